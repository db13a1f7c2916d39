"""Group-relative advantages: GRPO (arXiv 2402.03300); without the division by the spread, Dr. GRPO (2503.20783)."""

from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageOutputs, AdvantageParams, register_advantage
from vrl.algorithms.segments import Groups


@register_advantage("grpo")
def grpo(inputs: AdvantageInputs, params: AdvantageParams) -> AdvantageOutputs:
    """(score - group mean) / (group std + eps) on every sampled token; `norm_adv_by_std=False` leaves the division out.

    A group of equal scores gives exactly 0. A group of one has mean 0 and std 1, so that its advantage is its score.
    """
    groups = Groups.of(inputs.group)
    advantages = groups.normalised(inputs.scores(), params.eps, by_std=params.norm_adv_by_std)
    per_token = inputs.per_token(advantages)
    return AdvantageOutputs(advantages=per_token, returns=per_token)
