"""ReMax: the score of a greedy rollout is the baseline (arXiv 2310.10505)."""

from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageOutputs, AdvantageParams, register_advantage
from vrl.algorithms.advantages.sampled import SampledTokens


@register_advantage("remax", needs_reward_baselines=True)
def remax(inputs: AdvantageInputs, _params: AdvantageParams) -> AdvantageOutputs:
    """Undiscounted reward to go minus the score of the prompt's greedy rollout."""
    assert inputs.reward_baselines is not None  # the registry refuses a call without them
    sampled = SampledTokens.of(inputs)
    returns = sampled.to_tokens(sampled.discounted_sum(sampled.rewards, 1.0))
    return AdvantageOutputs(advantages=returns - inputs.per_token(inputs.reward_baselines), returns=returns)
