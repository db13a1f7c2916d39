"""REINFORCE with a leave-one-out baseline (arXiv 2402.14740)."""

from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageOutputs, AdvantageParams, register_advantage
from vrl.algorithms.segments import Groups


@register_advantage("rloo")
def rloo(inputs: AdvantageInputs, _params: AdvantageParams) -> AdvantageOutputs:
    """score - mean of the other scores of the group = (score - group mean) n / (n - 1).

    A group of one has no others: its baseline is 0, as in every estimator here.
    """
    groups = Groups.of(inputs.group)
    size = groups.sizes[groups.index].double()
    per_token = inputs.per_token(groups.centred(inputs.scores()) * size / (size - 1).clamp(min=1))
    return AdvantageOutputs(advantages=per_token, returns=per_token)
