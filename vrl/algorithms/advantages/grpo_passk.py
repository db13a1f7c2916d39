"""Pass@k advantages (arXiv 2503.19595): the best sample of a group is rewarded for its lead over the second best."""

import torch

from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageOutputs, AdvantageParams, register_advantage
from vrl.algorithms.segments import Groups


@register_advantage("grpo_passk")
def grpo_passk(inputs: AdvantageInputs, params: AdvantageParams) -> AdvantageOutputs:
    """(best - second best) / (group std + eps) for the best row of each group, 0 for all others and for ties.

    `norm_adv_by_std=False` leaves the division out. A group of one row is a ValueError.
    """
    scores = inputs.scores()
    groups = Groups.of(inputs.group)
    if bool(groups.alone.any()):
        row = int(groups.alone.nonzero()[0])
        raise ValueError(
            "adv_estimator=grpo_passk needs at least 2 rows a group, but "
            f"row {row} is alone in group {int(inputs.group[row])}; raise rollout.n or drop such groups"
        )
    by_score = scores.argsort(stable=True)
    order = by_score[groups.index[by_score].argsort(stable=True)]  # by group, then by score
    best = groups.sizes.cumsum(0) - 1
    lead = scores[order[best]] - scores[order[best - 1]]
    if params.norm_adv_by_std:
        lead = lead / (groups.std(scores)[order[best]] + params.eps)
    advantages = torch.zeros_like(scores).index_copy(0, order[best], lead)
    per_token = inputs.per_token(advantages)
    return AdvantageOutputs(advantages=per_token, returns=per_token)
