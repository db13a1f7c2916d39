"""REINFORCE++: discounted returns, whitened over the batch (arXiv 2501.03262)."""

from vrl.algorithms import segments
from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageOutputs, AdvantageParams, register_advantage
from vrl.algorithms.advantages.sampled import SampledTokens


@register_advantage("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, params: AdvantageParams) -> AdvantageOutputs:
    """G_t = r_t + gamma G_{t+1} over the sampled tokens of a row; advantages are the whitened returns."""
    sampled = SampledTokens.of(inputs)
    returns = sampled.discounted_sum(sampled.rewards, params.gamma)
    return AdvantageOutputs(
        advantages=sampled.to_tokens(segments.standardised(returns)),
        returns=sampled.to_tokens(returns),
    )
