"""Online preference losses on pairs of rollouts: DPO (arXiv 2305.18290), IPO (arXiv 2310.12036), label smoothing."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import logsigmoid

from vrl.algorithms.losses.registry import LossInputs, LossOutputs, LossParams, register_policy_loss
from vrl.algorithms.losses.whole_rows import row_log_probs, row_outputs
from vrl.algorithms.segments import Groups


@register_policy_loss(
    "dpo",
    aggregation="seq-mean-token-mean",
    needs_whole_groups=True,
    needs_ref_log_probs=True,
    compares_pairs=True,
)
def dpo(inputs: LossInputs, params: LossParams) -> LossOutputs:
    """Loss of each pair, on both of its rows: the mean over rows is the mean over pairs.

    The two rows of a group are a pair; the one with the larger score is chosen, of equal ones the first. With sums
    over sampled tokens [B] and z = (log pi - log ref)(chosen) - (log pi - log ref)(rejected), beta = `dpo_beta`,
    eps = `dpo_label_smoothing`: sigmoid -(1 - eps) log sigmoid(beta z) - eps log sigmoid(-beta z); ipo
    (z - 1 / (2 beta))^2. Zeros as reference log-probs give the reference-free form. Neither advantages nor old
    log-probs are read, and importance weights are refused.

    A group of one (the other rollout failed) has no pair, loss 0 and gradient 0, and counts as a row: leave it out of
    the mini-batch for a mean over pairs alone. More than two rows in a group are a ValueError. Deviation: TRL's IPO
    averages log-probs over tokens first; the paper's sum stands here. Row metrics, beta (log pi - log ref) and the
    share of pairs in the right order: rewards_chosen, rewards_rejected, rewards_margins, rewards_accuracies.
    """
    assert inputs.group is not None  # the registry refuses a call without them
    assert inputs.scores is not None
    assert inputs.ref_log_probs is not None
    gain = row_log_probs(inputs.log_probs, inputs.offsets) - row_log_probs(inputs.ref_log_probs, inputs.offsets)
    chosen, rejected = _pairs(Groups.of(inputs.group), inputs.scores)
    margin = gain[chosen] - gain[rejected]
    beta, smoothing = params.dpo_beta, params.dpo_label_smoothing
    if params.dpo_loss_type == "ipo":
        losses = (margin - 0.5 / beta).square()
    else:
        losses = -(1.0 - smoothing) * logsigmoid(beta * margin) - smoothing * logsigmoid(-beta * margin)
    per_pair = {
        "rewards_chosen": beta * gain[chosen],
        "rewards_rejected": beta * gain[rejected],
        "rewards_margins": beta * margin,
        "rewards_accuracies": (margin > 0).to(margin.dtype),
    }

    def on_rows(values: Float[Tensor, " P"]) -> Float[Tensor, " B"]:
        return torch.zeros_like(gain).index_add(0, chosen, values).index_add(0, rejected, values)

    return row_outputs(inputs, on_rows(losses), {name: on_rows(values) for name, values in per_pair.items()})


def _pairs(groups: Groups, scores: Float[Tensor, " B"]) -> tuple[Int64[Tensor, " P"], Int64[Tensor, " P"]]:
    """Chosen and rejected row of each group of two."""
    if bool((groups.sizes > 2).any()):
        raise ValueError(
            f"policy loss dpo compares the two rollouts of a prompt and got a group of {int(groups.sizes.max())} rows: "
            "set actor_rollout_ref.rollout.n=2"
        )
    by_group = torch.sort(groups.index, stable=True).indices
    first = (groups.sizes.cumsum(0) - groups.sizes)[groups.sizes == 2]
    one, other = by_group[first], by_group[first + 1]
    keep = scores[one] >= scores[other]
    return torch.where(keep, one, other), torch.where(keep, other, one)
