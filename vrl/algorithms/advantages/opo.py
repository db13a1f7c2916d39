"""On-policy RL with the optimal reward baseline (arXiv 2505.23585): the group mean weighted by response length."""

from vrl.algorithms import segments
from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageOutputs, AdvantageParams, register_advantage
from vrl.algorithms.segments import Groups


@register_advantage("opo")
def opo(inputs: AdvantageInputs, _params: AdvantageParams) -> AdvantageOutputs:
    """score - sum(length score) / sum(length) over the group, length in sampled tokens. A row alone has baseline 0."""
    scores = inputs.scores()
    lengths = segments.row_counts(inputs.mask, inputs.offsets).to(scores.dtype)
    per_token = inputs.per_token(Groups.of(inputs.group).centred(scores, weights=lengths))
    return AdvantageOutputs(advantages=per_token, returns=per_token)
