"""REINFORCE++ with the group mean as baseline (arXiv 2501.03262)."""

from vrl.algorithms import segments
from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageOutputs, AdvantageParams, register_advantage
from vrl.algorithms.segments import Groups


@register_advantage("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, _params: AdvantageParams) -> AdvantageOutputs:
    """score - group mean on every sampled token, whitened over the sampled tokens of the batch.

    Whitening subtracts the batch mean over tokens: a group of equal scores is exactly 0 only when all groups are.
    """
    centred = inputs.per_token(Groups.of(inputs.group).centred(inputs.scores()))
    per_token = segments.whiten(centred, inputs.mask)
    return AdvantageOutputs(advantages=per_token, returns=per_token)
