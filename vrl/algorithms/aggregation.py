"""From a per-token loss to one number: the only place that divides, and it divides by counts of the whole mini-batch.

The learner counts its rows once (`counts`), adds the counts of all data-parallel ranks, and calls `aggregate` on each
micro-batch with the same global counts. The results summed over micro-batches and ranks are the mini-batch's value,
however the rows were cut; nothing depends on a padded width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from vrl.algorithms import segments

AGGREGATION_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "seq-mean-turn-mean-token-mean",
)


@final
@dataclass(frozen=True, slots=True)
class Counts:
    """Sampled tokens, and sequences with at least one of them. Counts of disjoint parts add up."""

    tokens: int
    sequences: int

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.tokens + other.tokens, self.sequences + other.sequences)


def counts(mask: Bool[Tensor, " T"], offsets: Int64[Tensor, " B1"]) -> Counts:
    """Counts of the rows at hand."""
    per_row = segments.row_counts(mask, offsets)
    return Counts(tokens=int(per_row.sum()), sequences=int((per_row > 0).sum()))


def aggregate(
    per_token: Float[Tensor, " T"],
    mask: Bool[Tensor, " T"],
    offsets: Int64[Tensor, " B1"],
    mode: str,
    global_counts: Counts,
    norm_length: float | None = None,
    turn_ids: Int[Tensor, " T"] | None = None,
) -> Float[Tensor, ""]:
    """This part's share of the mini-batch loss under `loss_agg_mode=mode`.

    token-mean: sum of all tokens / tokens. token-sum: the sum. seq-mean-token-sum: token sum of each sequence, mean
    over sequences. seq-mean-token-sum-norm: the same divided by `norm_length` tokens. seq-mean-token-mean: token mean
    of each sequence, mean over sequences. seq-mean-turn-mean-token-mean: token mean of each turn, mean over the turns
    of a sequence, mean over sequences, so that a long turn weighs no more than a short one. Sequences and turns without
    a sampled token count nowhere. A part without any gives 0 with a zero gradient, and values on masked tokens reach
    neither loss nor gradient.

    Raises ValueError for an unknown mode, for seq-mean-token-sum-norm without a positive `norm_length`, and for
    seq-mean-turn-mean-token-mean without `turn_ids` (k on the sampled tokens of turn k) or with ids that go down.
    """
    if mode not in AGGREGATION_MODES:
        raise ValueError(f"unknown loss_agg_mode {mode!r}; known: {', '.join(AGGREGATION_MODES)}")
    wide = torch.promote_types(per_token.dtype, torch.float32)
    kept = torch.where(mask, per_token, 0.0).to(wide)
    if mode == "seq-mean-token-mean":
        row_weight = 1.0 / segments.row_counts(mask, offsets).clamp(min=1).to(wide)
        kept = kept * segments.spread(row_weight, offsets, kept.numel())
    elif mode == "seq-mean-turn-mean-token-mean":
        kept = kept * _turn_weights(mask, offsets, turn_ids).to(wide)
    return kept.sum() / _divisor(mode, global_counts, norm_length)


def _turn_weights(
    mask: Bool[Tensor, " T"], offsets: Int64[Tensor, " B1"], turn_ids: Int[Tensor, " T"] | None
) -> Float[Tensor, " T"]:
    """1 / (tokens of the turn * turns of the row) on sampled tokens, 0 elsewhere; float64."""
    if turn_ids is None:
        raise ValueError(
            "loss_agg_mode=seq-mean-turn-mean-token-mean needs turn_ids: give it the turn of each sampled token, "
            "or choose seq-mean-token-mean"
        )
    positions = mask.nonzero().squeeze(1)
    turns = segments.Turns.of(turn_ids.index_select(0, positions), segments.row_counts(mask, offsets))
    weights = 1.0 / (turns.lengths * turns.per_row[turns.row]).double()
    sampled = segments.spread(weights, turns.offsets, positions.numel())
    return weights.new_zeros(mask.shape).scatter_(0, positions, sampled)


def _divisor(mode: str, global_counts: Counts, norm_length: float | None) -> float:
    if mode == "token-sum":
        return 1.0
    if mode == "token-mean":
        return float(max(global_counts.tokens, 1))
    sequences = float(max(global_counts.sequences, 1))
    if mode != "seq-mean-token-sum-norm":
        return sequences
    if norm_length is None or norm_length <= 0:
        raise ValueError(
            f"loss_agg_mode=seq-mean-token-sum-norm divides by a fixed length and got {norm_length}; "
            "set loss_scale_factor, for example to data.max_response_length"
        )
    return sequences * norm_length


def token_sums(metrics: Mapping[str, Float[Tensor, " T"]], mask: Bool[Tensor, " T"]) -> dict[str, Float[Tensor, ""]]:
    """Sums over the sampled tokens: add them over micro-batches and ranks, divide once by the global tokens."""
    return {name: torch.where(mask, values.detach(), 0.0).sum() for name, values in metrics.items()}
