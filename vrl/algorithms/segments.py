"""Reductions and scans over the rows of flat ragged tensors, for the advantage estimators, losses and aggregation.

Shape letters: B rows, B1 = B + 1 row borders, T tokens, N sampled tokens (mask true) in row order, K turns, G groups.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

_BLOCK = 64  # tokens a block of the scan; at 64 the matrix product costs about as much as moving the data


def check_offsets(offsets: Int64[Tensor, " B1"], total: int) -> None:
    """ValueError unless `offsets` runs from 0 to `total` without going down. Reads values, so it waits for a GPU."""
    if offsets.dtype != torch.int64 or offsets.ndim != 1 or offsets.numel() == 0:
        raise ValueError(f"offsets must be int64 [B+1], got {offsets.dtype} {list(offsets.shape)}")
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != total:
        raise ValueError(f"offsets must run from 0 to the {total} tokens given, got {first} to {last}")
    if bool((offsets.diff() < 0).any()):
        row = int((offsets.diff() < 0).nonzero()[0])
        raise ValueError(f"offsets go down at row {row}: {int(offsets[row])} to {int(offsets[row + 1])}")


def row_sum(x: Float[Tensor, " T"], offsets: Int64[Tensor, " B1"]) -> Float[Tensor, " B1-1"]:
    """Sum over the tokens of each row; 0 for a row without tokens. Differentiable."""
    if offsets.numel() == 1:
        return x.new_zeros(0)
    return torch.segment_reduce(x, "sum", offsets=offsets)


def row_counts(mask: Bool[Tensor, " T"], offsets: Int64[Tensor, " B1"]) -> Int64[Tensor, " B1-1"]:
    """Number of sampled tokens of each row."""
    running = torch.nn.functional.pad(mask.cumsum(0, dtype=torch.int32), (1, 0))  # int32: several times faster
    return running[offsets].diff().long()


def row_mean(x: Float[Tensor, " T"], mask: Bool[Tensor, " T"], offsets: Int64[Tensor, " B1"]) -> Float[Tensor, " B1-1"]:
    """Mean over the sampled tokens of each row; 0 for a row without any. Differentiable; never reads masked tokens."""
    return row_sum(torch.where(mask, x, 0.0), offsets) / row_counts(mask, offsets).clamp(min=1)


def spread(row_values: Float[Tensor, " B"], offsets: Int64[Tensor, " B+1"], total: int) -> Float[Tensor, " T"]:
    """Gives each of the `total` tokens the value of its row."""
    return torch.repeat_interleave(row_values, offsets.diff(), output_size=total)


@torch.no_grad()
def row_totals(x: Float[Tensor, " T"], offsets: Int64[Tensor, " B1"]) -> Float[Tensor, " B1-1"]:
    """`row_sum`, given as float64 and faster on a CPU. Not differentiable."""
    if x.device.type != "cpu" or x.dtype == torch.bfloat16:
        return row_sum(x, offsets).double()
    sums = np.zeros(offsets.numel() - 1)
    starts = offsets[:-1].numpy()
    filled = starts < offsets[1:].numpy()
    if filled.any():  # numpy adds several numbers at a time, torch one by one
        sums[filled] = np.add.reduceat(x.detach().numpy(), starts[filled])
    return torch.from_numpy(sums)


@torch.no_grad()
def spread_sampled(
    row_values: Float[Tensor, " B"], mask: Bool[Tensor, " T"], offsets: Int64[Tensor, " B1"]
) -> Float[Tensor, " T"]:
    """Gives each sampled token the value of its row, 0 elsewhere. Not differentiable."""
    if row_values.device.type != "cpu" or row_values.dtype == torch.bfloat16:
        return spread(row_values, offsets, mask.numel()).mul_(mask)
    values = np.repeat(row_values.detach().numpy(), np.diff(offsets.numpy()))  # torch takes five times as long for both
    np.multiply(values, mask.numpy(), out=values)
    return torch.from_numpy(values)


def last_sampled(mask: Bool[Tensor, " T"], offsets: Int64[Tensor, " B1"]) -> Int64[Tensor, " B1-1"]:
    """Flat index of the last sampled token of each row; -1 for a row without any."""
    sampled = torch.nn.functional.pad(mask.nonzero().squeeze(1), (1, 0), value=-1)
    counts = row_counts(mask, offsets)
    return torch.where(counts > 0, sampled[counts.cumsum(0)], -1)


def place_on_last_sampled(
    scores: Float[Tensor, " B"], mask: Bool[Tensor, " T"], offsets: Int64[Tensor, " B+1"]
) -> Float[Tensor, " T"]:
    """Token-level rewards from row scores: each stands on the row's last sampled token; a row without one gets none."""
    last = last_sampled(mask, offsets)
    rewards = scores.new_zeros(mask.shape)
    rewards[last[last >= 0]] = scores[last >= 0]
    return rewards


@torch.no_grad()
def reverse_scan(x: Float[Tensor, " N"], counts: Int64[Tensor, " B"], decay: float) -> Float[Tensor, " N"]:
    """y_t = x_t + decay * y_{t+1} inside each row of `counts[b]` tokens; nothing crosses a row border.

    Not differentiable. There is no loop over time: rows are cut into blocks of 64 tokens (the last one of a row is
    filled with zeros), one matrix product with the powers of `decay` solves all blocks, and what a block takes over
    from the next one is the same problem over the blocks' first tokens with decay ** 64. That is solved by recursion,
    one level for rows up to 4096 tokens.
    """
    if x.numel() == 0:
        return x.clone()
    blocks_of_row = (counts + _BLOCK - 1) // _BLOCK
    place = places((blocks_of_row.cumsum(0) - blocks_of_row) * _BLOCK, counts, x.numel())
    blocks = x.new_zeros(int(blocks_of_row.sum()), _BLOCK)
    blocks.view(-1).scatter_(0, place, x)
    steps = torch.arange(_BLOCK + 1, device=x.device)
    powers = (float(decay) ** steps.double()).to(x.dtype)
    solved = blocks @ powers[(steps[:-1, None] - steps[:-1]).clamp(min=0)].tril()
    if int(blocks_of_row.max()) > 1:
        first = reverse_scan(solved[:, 0].contiguous(), blocks_of_row, decay**_BLOCK)
        solved.addcmul_(next_in_row(first, blocks_of_row)[:, None], powers[1:].flip(0))
    return solved.view(-1).index_select(0, place)


def places(starts: Int64[Tensor, " B"], counts: Int64[Tensor, " B"], total: int) -> Int64[Tensor, " N"]:
    """Where each of the `total` tokens stands when row b of `counts[b]` tokens begins at `starts[b]`."""
    shift = torch.repeat_interleave(starts - (counts.cumsum(0) - counts), counts, output_size=total)
    return shift.add_(torch.arange(total, device=counts.device))


def next_in_row(x: Float[Tensor, " N"], counts: Int64[Tensor, " B"]) -> Float[Tensor, " N"]:
    """x of the next token of the same row of `counts[b]` tokens; 0 behind the last one."""
    following = torch.empty_like(x)
    following[:-1] = x[1:]
    following[counts.cumsum(0)[counts > 0] - 1] = 0.0
    return following


def standardised(x: Float[Tensor, " N"], eps: float = 1e-8) -> Float[Tensor, " N"]:
    """(x - mean) * rsqrt(var + eps), variance with n - 1. All 0 with fewer than two values or with all values equal."""
    if x.numel() < 2:
        return torch.zeros_like(x)
    centred = x - x[0]  # equal values become exactly 0 before any rounding
    centred -= (centred.sum(dtype=torch.float64) / x.numel()).to(x.dtype)
    variance = torch.linalg.vector_norm(centred, dtype=torch.float64).square() / (x.numel() - 1)
    return centred.mul_(torch.rsqrt(variance + eps).to(x.dtype))


def whiten(x: Float[Tensor, " T"], mask: Bool[Tensor, " T"], eps: float = 1e-8) -> Float[Tensor, " T"]:
    """`standardised` over the sampled tokens only; 0 on masked tokens, which are never read."""
    positions = mask.nonzero().squeeze(1)
    return torch.zeros_like(x).scatter_(0, positions, standardised(x.index_select(0, positions), eps))


@final
@dataclass(frozen=True, slots=True)
class Turns:
    """The K turns of a batch in row order: runs of sampled tokens of one row with the same turn id.

    `offsets [K+1]` are their borders in the N sampled tokens, `row [K]` and `ids [K]` their rows and turn ids, and row
    b has `per_row[b]` turns. A turn of which no token is in the mask is no turn here.
    """

    offsets: Int64[Tensor, " K1"]
    row: Int64[Tensor, " K"]
    ids: Int64[Tensor, " K"]
    per_row: Int64[Tensor, " B"]

    @classmethod
    def of(cls, turn_ids: Int[Tensor, " N"], counts: Int64[Tensor, " B"]) -> "Turns":
        """From the turn ids of the sampled tokens; row b has `counts[b]` of them.

        ValueError unless the ids are 0 or more and never go down inside a row. Reads values, so it waits for a GPU.
        """
        ends = counts.cumsum(0)
        first = torch.ones_like(turn_ids, dtype=torch.bool)
        first[1:] = turn_ids[1:] != turn_ids[:-1]
        first[(ends - counts)[counts > 0]] = True
        starts = first.nonzero().squeeze(1)
        row = torch.searchsorted(ends, starts, right=True)
        ids = turn_ids.index_select(0, starts).long()
        wrong = ids < 0
        wrong[1:] |= (row.diff() == 0) & (ids.diff() < 0)
        if bool(wrong.any()):
            k = int(wrong.nonzero()[0])
            raise ValueError(
                f"turn_ids must be 0, 1, 2, ... on the sampled tokens of a row and never go down, "
                f"but row {int(row[k])} has {ids[row == row[k]].tolist()}"
            )
        offsets = torch.nn.functional.pad(starts, (0, 1), value=turn_ids.numel())
        return cls(offsets=offsets, row=row, ids=ids, per_row=torch.bincount(row, minlength=counts.numel()))

    @property
    def lengths(self) -> Int64[Tensor, " K"]:
        """Sampled tokens of each turn."""
        return self.offsets.diff()


@final
@dataclass(frozen=True, slots=True)
class Groups:
    """Rows by group: `index [B]` numbers groups from 0 (their rows need not be neighbours), `sizes [G]` counts rows."""

    index: Int64[Tensor, " B"]
    sizes: Int64[Tensor, " G"]

    @classmethod
    def of(cls, group: Int64[Tensor, " B"]) -> "Groups":
        """From any integer group ids."""
        _, index, sizes = torch.unique(group, return_inverse=True, return_counts=True)
        return cls(index=index, sizes=sizes)

    @classmethod
    def of_pairs(cls, index: Int64[Tensor, " B"], ids: Int64[Tensor, " B"]) -> "Groups":
        """By two numbers, of which `index` is at least 0."""
        _, second = torch.unique(ids, return_inverse=True)
        return cls.of(index * max(ids.numel(), 1) + second)

    @property
    def alone(self) -> Bool[Tensor, " B"]:
        """True for rows that are the only one of their group."""
        return self.sizes[self.index] == 1

    def sum(self, x: Float[Tensor, " B"]) -> Float[Tensor, " G"]:
        """Sum over the rows of each group."""
        return x.new_zeros(self.sizes.numel()).index_add(0, self.index, x)

    def min(self, x: Float[Tensor, " B"]) -> Float[Tensor, " G"]:
        """Smallest value of each group."""
        return x.new_zeros(self.sizes.numel()).scatter_reduce(0, self.index, x, "amin", include_self=False)

    def max(self, x: Float[Tensor, " B"]) -> Float[Tensor, " G"]:
        """Largest value of each group."""
        return x.new_zeros(self.sizes.numel()).scatter_reduce(0, self.index, x, "amax", include_self=False)

    def centred(self, x: Float[Tensor, " B"], weights: Float[Tensor, " B"] | None = None) -> Float[Tensor, " B"]:
        """x minus the (weighted) mean of its group; exactly 0 in a group of equal values.

        A group of one has baseline 0 and keeps its value, as the field does. A group whose weights are all 0 keeps the
        distance to its smallest value.
        """
        weights = torch.ones_like(x) if weights is None else weights
        above = x - self.min(x)[self.index]  # equal values become exactly 0 before any rounding
        total = self.sum(weights)
        mean = self.sum(above * weights) / torch.where(total == 0, 1.0, total)
        return torch.where(self.alone, x, above - mean[self.index])

    def std(self, x: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Standard deviation (n - 1) of each row's group; 1 for a group of one."""
        squares = self.sum(self.centred(x).square()) / (self.sizes - 1).clamp(min=1)
        return torch.where(self.alone, 1.0, squares.sqrt()[self.index])

    def normalised(self, x: Float[Tensor, " B"], eps: float, *, by_std: bool = True) -> Float[Tensor, " B"]:
        """(x - group mean) / (group std + eps), or without the division. Equal values give 0, a value alone stays."""
        centred = self.centred(x)
        return centred / (self.std(x) + eps) if by_std else centred
