"""Pass@k advantages (arXiv 2503.19595): the best sample of a group is rewarded for its lead over the second best."""

import torch

from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageOutputs, AdvantageParams, register_advantage
from vrl.algorithms.segments import Groups


@register_advantage("grpo_passk")
def grpo_passk(inputs: AdvantageInputs, params: AdvantageParams) -> AdvantageOutputs:
    """(best - second best) / (group std + eps) for the best row of each group, 0 for all others and for ties.

    `norm_adv_by_std=False` leaves the division out. A row alone in its group, whose other episodes failed, leads
    nobody and gets 0, unlike in grpo.
    """
    scores = inputs.scores()
    groups = Groups.of(inputs.group)
    by_score = scores.argsort(stable=True)
    order = by_score[groups.index[by_score].argsort(stable=True)]  # by group, then by score
    best = groups.sizes.cumsum(0) - 1
    lead = torch.where(groups.sizes > 1, scores[order[best]] - scores[order[best - 1]], 0.0)
    if params.norm_adv_by_std:
        lead = lead / (groups.std(scores)[order[best]] + params.eps)
    advantages = torch.zeros_like(scores).index_copy(0, order[best], lead)
    per_token = inputs.per_token(advantages)
    return AdvantageOutputs(advantages=per_token, returns=per_token)
