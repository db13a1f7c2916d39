"""Dispatch rules: how a worker method's rows go to the ranks and how results come back.

Worker methods declare themselves with `@register`; the worker group in `controller/` reads the declaration, checks
the columns before it ships, and calls the functions here. Pure: no Ray, no process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vrl.protocol.balance import RowPrompt, partition, prompt_units, rows_of, unit_sums, units_of
from vrl.protocol.columns import missing_column_message
from vrl.protocol.dataproto import DataProto
from vrl.protocol.ragged import as_array

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Dispatch(Enum):
    """Where the arguments of a call go."""

    ALL = "all"  # the same arguments to every rank; results as a list in rank order
    ROWS = "rows"  # token-balanced shares of the rows, one a data-parallel rank; results in the caller's order
    MINI_BATCHES = "mini_batches"  # like ROWS inside every mini-batch; returns metrics of all ranks


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """What a worker method declares."""

    name: str
    dispatch: Dispatch
    requires: tuple[str, ...]
    returns: tuple[str, ...]


_SPECS: dict[Callable[..., Any], MethodSpec] = {}


def register(dispatch: Dispatch, requires: Sequence[str] = (), returns: Sequence[str] = ()) -> Callable[[F], F]:
    """Declare a worker method: how it is dispatched, which columns it needs and which it returns."""

    def wrap(method: F) -> F:
        _SPECS[method] = MethodSpec(method.__qualname__, dispatch, tuple(requires), tuple(returns))
        return method

    return wrap


def method_spec(worker_class: type, method: str) -> MethodSpec:
    """Return a method's declaration. Raises AttributeError when the class has no such registered method."""
    function = vars(worker_class).get(method)
    if function is None or function not in _SPECS:
        known = sorted(name for name, value in vars(worker_class).items() if callable(value) and value in _SPECS)
        raise AttributeError(f"{worker_class.__name__} has no registered method {method!r}; it has {known}")
    return _SPECS[function]


def check_columns(spec: MethodSpec, batch: DataProto) -> None:
    """Raise ValueError naming the first column that the method needs and the batch lacks."""
    for name in spec.requires:
        if name not in batch:
            raise ValueError(missing_column_message(spec.name, name))


def row_shares(lengths: Sequence[int], ranks: int, prompts: Sequence[RowPrompt] | None = None) -> list[list[int]]:
    """Return each data-parallel rank's rows: equal counts (within one), balanced by tokens.

    With `prompts` the rows of each stay together, and counts are free.
    """
    if prompts is not None:
        return _shares_of_prompts(lengths, ranks, prompts)
    if len(set(lengths)) == 1:  # neighbours are as even as any, and views of the batch instead of copies
        base, extra = divmod(len(lengths), ranks)
        starts = [rank * base + min(rank, extra) for rank in range(ranks + 1)]
        return [list(range(start, stop)) for start, stop in pairwise(starts)]
    return partition(lengths, ranks, equal_counts=True)


def _shares_of_prompts(lengths: Sequence[int], ranks: int, prompts: Sequence[RowPrompt]) -> list[list[int]]:
    """Balance by the tokens that are computed. A prompt's rows are cut if they are above an even part and it helps."""
    whole = units_of([prompt.number for prompt in prompts])
    even = -(-sum(unit_sums(whole, lengths, prompts)) // ranks)
    plans = [
        rows_of(units, partition(unit_sums(units, lengths, prompts), ranks))
        for units in (whole, prompt_units(lengths, prompts, max(even, 1)))
    ]
    return min(plans, key=lambda shares: max(unit_sums(shares, lengths, prompts)))


def to_ranks(shares: Sequence[T], ranks_a_share: int) -> list[T]:
    """Return every rank's share from those of the data-parallel ranks.

    `ranks_a_share` neighbouring ranks form a sequence-parallel group, which is one data-parallel rank.
    """
    return [share for share in shares for _ in range(ranks_a_share)]


def from_ranks(results: Sequence[T], ranks_a_share: int) -> list[T]:
    """Return the results of the data-parallel ranks: the ranks of a group have the same, its first one's is taken."""
    return list(results[::ranks_a_share])


@dataclass(frozen=True, slots=True)
class MiniBatchShare:
    """One rank's part of an update: its rows, and which of them each optimizer step uses.

    `steps[k]` lists positions in `rows` for the k-th mini-batch over all epochs; it may be empty.
    """

    rows: list[int]
    steps: list[list[int]]


def mini_batch_shares(
    membership: Tensor,
    lengths: Sequence[int],
    ranks: int,
    groups: Tensor | None = None,
    prompts: Sequence[RowPrompt] | None = None,
) -> list[MiniBatchShare]:
    """Cut every mini-batch over the ranks, balanced by tokens.

    `membership` is the `mini_batch` column, int64 `[B, E]`: the mini-batch of a row in each epoch. `groups` is the
    `group` column, int64 `[B]`: rows of one group that are in one mini-batch go to one rank. So do as a rule those of
    one of the `prompts`, to be computed together.
    """
    group_of = as_array(torch.arange(len(lengths)) if groups is None else groups)
    plans: list[list[list[int]]] = [[] for _ in range(ranks)]
    for column in as_array(membership).T:
        for number in range(int(column.max()) + 1 if len(column) else 0):
            members: list[int] = np.flatnonzero(column == number).tolist()
            tokens = [lengths[i] for i in members]
            begins = None if prompts is None else [prompts[i] for i in members]
            if groups is None and begins is not None:
                shares = row_shares(tokens, ranks, begins)
            else:
                units = units_of(group_of[members].tolist())
                shares = rows_of(units, partition(unit_sums(units, tokens, begins), ranks))
            for rank, share in enumerate(shares):
                plans[rank].append([members[i] for i in share])
    out: list[MiniBatchShare] = []
    for plan in plans:
        rows = sorted({i for step in plan for i in step})
        position = {row: k for k, row in enumerate(rows)}
        out.append(MiniBatchShare(rows, [[position[i] for i in step] for step in plan]))
    return out


def assign_mini_batches(groups: Sequence[str], groups_a_batch: int, epochs: int, seed: int, shuffle: bool) -> Tensor:
    """Return the `mini_batch` column: all rows of `groups_a_batch` uids form a mini-batch, the last may be smaller.

    Order is by first appearance, or shuffled by (seed, epoch).
    """
    if groups_a_batch < 1:
        raise ValueError(f"a mini-batch needs one group or more, got {groups_a_batch}")
    unique = list(dict.fromkeys(groups))
    number = {uid: i for i, uid in enumerate(unique)}
    index = torch.tensor([number[uid] for uid in groups], dtype=torch.int64)
    columns: list[Tensor] = []
    for epoch in range(epochs):
        place = torch.arange(len(unique))
        if shuffle:
            generator = torch.Generator().manual_seed(seed * 1009 + epoch)
            place = torch.randperm(len(unique), generator=generator)
        columns.append((place // groups_a_batch)[index])
    return torch.stack(columns, 1) if len(groups) else torch.zeros(0, epochs, dtype=torch.int64)
