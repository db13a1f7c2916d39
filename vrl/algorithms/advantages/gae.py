"""Generalised advantage estimation over the sampled tokens of each row (Schulman et al., arXiv 1506.02438)."""

from vrl.algorithms import segments
from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageOutputs, AdvantageParams, register_advantage
from vrl.algorithms.advantages.sampled import SampledTokens


@register_advantage("gae", needs_critic=True)
def gae(inputs: AdvantageInputs, params: AdvantageParams) -> AdvantageOutputs:
    """delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; returns = A + V; then A is whitened.

    t + 1 is the next sampled token of the row; the value behind the last one is 0. Other values are never read.
    """
    assert inputs.values is not None  # the registry refuses a call without them
    sampled = SampledTokens.of(inputs)
    values = inputs.values.index_select(0, sampled.positions).to(sampled.rewards.dtype)
    delta = sampled.next_of(values).mul_(params.gamma).add_(sampled.rewards).sub_(values)
    advantages = sampled.discounted_sum(delta, params.gamma * params.lam)
    return AdvantageOutputs(
        advantages=sampled.to_tokens(segments.standardised(advantages)),
        returns=sampled.to_tokens(advantages + values),
    )
