"""Group policy gradient (arXiv 2504.02546): group-centred scores, scaled up for the samples without a gradient."""

from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageOutputs, AdvantageParams, register_advantage
from vrl.algorithms.segments import Groups


@register_advantage("gpg")
def gpg(inputs: AdvantageInputs, _params: AdvantageParams) -> AdvantageOutputs:
    """alpha (score - group mean) with alpha = B / (B - M), M the number of rows whose whole group has advantage 0.

    verl divides by the number of rows with a non-zero score, which changes when a constant is added to all scores.
    """
    groups = Groups.of(inputs.group)
    centred = groups.centred(inputs.scores())
    moving = int((groups.max(centred.abs()) > 0)[groups.index].sum())
    per_token = inputs.per_token(centred * (inputs.rows / max(moving, 1)))
    return AdvantageOutputs(advantages=per_token, returns=per_token)
