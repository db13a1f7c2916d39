"""Group reward-decoupled normalisation (arXiv 2601.05242): each part of the score is compared on its own."""

import torch

from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageOutputs, AdvantageParams, register_advantage
from vrl.algorithms.segments import Groups


@register_advantage("gdpo", needs_reward_components=True)
def gdpo(inputs: AdvantageInputs, params: AdvantageParams) -> AdvantageOutputs:
    """(S - mean) / (std + eps) over all rows of the batch, with S = sum over parts c of w_c A_c.

    A_c = (r_c - group mean) / (group std + eps) is the grpo advantage of part c (`norm_adv_by_std=False` leaves its
    division out), w_c its weight in `component_weights`. std has n - 1. Parts that are equal in a group add exactly 0
    for it; a row alone in its group keeps its parts. Token rewards, and so a KL penalty in them, are not read.

    verl takes the last mean and std over sampled tokens, so that long rows weigh more; the paper takes them over rows.
    ValueError unless there are as many weights as parts.
    """
    assert inputs.reward_components is not None  # the registry refuses a call without them
    parts = inputs.reward_components.double()
    weights = params.component_weights if params.component_weights is not None else (1.0,) * parts.shape[1]
    if len(weights) != parts.shape[1]:
        raise ValueError(
            f"adv_estimator=gdpo has {len(weights)} weights for {parts.shape[1]} reward components; "
            "give algorithm.gdpo_reward_weights one number for each of algorithm.gdpo_reward_keys"
        )
    groups = Groups.of(inputs.group)
    total = parts.new_zeros(inputs.rows)
    for part, weight in zip(parts.unbind(1), weights, strict=True):
        total += weight * groups.normalised(part, params.eps, by_std=params.norm_adv_by_std)
    whole_batch = Groups.of(torch.zeros_like(inputs.group))
    per_token = inputs.per_token(whole_batch.normalised(total, params.eps))
    return AdvantageOutputs(advantages=per_token, returns=per_token)
