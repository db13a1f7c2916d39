"""Ragged columns: per-token values of rows of unequal length, flat with offsets. Used by DataProto and the learner.

Also here: how rows are cut out of columns, neighbouring ones as views and others in one pass over the memory.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Below so many elements a piece, one index for all of them is faster than copying piece by piece.
_MIN_PIECE = 128


@final
@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of unequal length: `values [T, ...]`, `offsets int64 [B+1]`; row i is `values[offsets[i]:offsets[i+1]]`."""

    values: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        if self.offsets.dtype != torch.int64 or self.offsets.dim() != 1 or len(self.offsets) < 1:
            raise ValueError(f"offsets must be int64 [B+1], got {self.offsets.dtype} {tuple(self.offsets.shape)}")
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        if first != 0:
            raise ValueError(f"offsets start at {first}, not at 0")
        if last != len(self.values):
            raise ValueError(f"offsets end at {last} but there are {len(self.values)} values")
        if bool((self.offsets.diff() < 0).any()):
            raise ValueError(f"offsets decrease: {as_array(self.offsets).tolist()}")

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor | Sequence[float]], dtype: torch.dtype) -> "Ragged":
        """Build from one sequence a row; `rows` may be empty."""
        if dtype is not torch.bfloat16 and all(_is_flat(row) for row in rows):
            return cls(_joined(rows, dtype), offsets_of(torch.tensor([len(row) for row in rows], dtype=torch.int64)))
        tensors = [_row_of(row, dtype) for row in rows]
        lengths = torch.tensor([len(t) for t in tensors], dtype=torch.int64)
        values = torch.cat(tensors) if tensors else torch.zeros(0, dtype=dtype)
        return cls(values, offsets_of(lengths))

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> "Ragged":
        """Build from right-padded `padded [B, L, ...]` and row lengths `[B]`."""
        keep = torch.arange(padded.shape[1]) < lengths[:, None]
        return cls(padded[keep], offsets_of(lengths))

    @classmethod
    def trusted(cls, values: Tensor, offsets: Tensor) -> "Ragged":
        """Build from parts of columns that were checked before; the checks cost more than a view does."""
        new = object.__new__(cls)
        _set_values(new, values)
        _set_offsets(new, offsets)
        return new

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """Row lengths, int64 `[B]`."""
        return self.offsets.diff()

    def row(self, i: int) -> Tensor:
        """Return the values of one row, a view; a negative number counts from the end."""
        count = len(self)
        if not -count <= i < count:
            raise IndexError(f"row {i} of {count}")
        i %= count
        return self.values[int(self.offsets[i]) : int(self.offsets[i + 1])]

    def to_rows(self) -> list[Tensor]:
        """Return one view a row."""
        return list(torch.split_with_sizes(self.values, as_array(self.lengths).tolist()))

    def to_padded(self, fill: float = 0) -> Tensor:
        """Return `[B, L, ...]`, right-padded with `fill` to the longest row."""
        lengths = self.lengths
        width = int(lengths.max()) if len(lengths) else 0
        out = self.values.new_full((len(self), width, *self.values.shape[1:]), fill)
        out[torch.arange(width) < lengths[:, None]] = self.values
        return out

    def take(self, gather: "RowGather | RowRepeat") -> "Ragged":
        """Return the rows of a gather made from this column's offsets."""
        return Ragged.trusted(gather.take(self.values), gather.offsets)


# The slots themselves: a view of a column is made for every run of rows, and half its cost was the way past `frozen`.
_set_values = vars(Ragged)["values"].__set__
_set_offsets = vars(Ragged)["offsets"].__set__


def offsets_of(lengths: Tensor) -> Tensor:
    """Return int64 offsets `[B+1]` of row lengths `[B]`."""
    out = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=out[1:])
    return out


def as_array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's memory as a contiguous array. Numpy has no bfloat16: its bits come as int16."""
    whole = tensor.detach().contiguous()
    return (whole.view(torch.int16) if whole.dtype == torch.bfloat16 else whole).numpy()


def _is_flat(row: Tensor | Sequence[float]) -> bool:
    """Whether a row is a list or tuple of numbers."""
    return isinstance(row, list | tuple) and not (row and isinstance(row[0], list | tuple))


def _joined(rows: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Return all numbers of flat rows, one row behind the other; one array for all is far cheaper than one each."""
    numbers = itertools.chain.from_iterable(rows)
    name = str(dtype).removeprefix("torch.")
    return torch.as_tensor(np.fromiter(numbers, dtype=name, count=sum(map(len, rows))))


def _row_of(row: Tensor | Sequence[float], dtype: torch.dtype) -> Tensor:
    if isinstance(row, Tensor) or dtype is torch.bfloat16:
        return torch.as_tensor(row, dtype=dtype)
    # Numpy reads long tuples several times faster than torch does.
    return torch.as_tensor(np.array(row, dtype=str(dtype).removeprefix("torch.")))


@final
@dataclass(frozen=True, slots=True, eq=False)
class RowGather:
    """How to gather chosen rows out of flat values. Made once for all columns that share offsets.

    One run of neighbouring rows is a view. Otherwise the runs are copied one behind the other, or, where they are
    short, by one index.
    """

    offsets: Tensor
    runs: Sequence[tuple[int, int]]  # token spans; unused where there is an index
    index: Tensor | None

    @classmethod
    def of(cls, offsets: Tensor, rows: Tensor) -> "RowGather":
        """Plan the gather of `rows` int64, each 0..B-1, out of columns with these offsets."""
        if not len(rows):
            return cls(torch.zeros(1, dtype=torch.int64), [(0, 0)], None)
        chosen, bounds = rows.numpy(), offsets.numpy()
        cuts = np.flatnonzero(np.diff(chosen) != 1) + 1
        firsts, lasts = chosen[np.append(0, cuts)], chosen[np.append(cuts - 1, len(chosen) - 1)]
        starts, stops = bounds[firsts], bounds[lasts + 1]
        new = offsets_of(torch.as_tensor(bounds[chosen + 1] - bounds[chosen]))
        if len(starts) == 1 or int(new[-1]) >= _MIN_PIECE * len(starts):
            return cls(new, list(zip(starts.tolist(), stops.tolist(), strict=True)), None)
        sizes = stops - starts
        shift = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
        return cls(new, [], torch.as_tensor(shift + np.arange(len(shift))))

    def take(self, values: Tensor) -> Tensor:
        """Return the chosen rows' values, flat."""
        if self.index is not None:
            return values.index_select(0, self.index)
        if len(self.runs) == 1:
            return values[self.runs[0][0] : self.runs[0][1]]
        source = as_array(values)
        out = torch.empty((int(self.offsets[-1]), *values.shape[1:]), dtype=values.dtype)
        np.concatenate([source[a:b] for a, b in self.runs], out=as_array(out))
        return out


@final
@dataclass(frozen=True, slots=True, eq=False)
class RowRepeat:
    """How to repeat every row of flat values: a a b b (interleaved) or a b a b. Made once for all columns."""

    offsets: Tensor
    bounds: Sequence[int]  # of the rows to repeat
    times: int
    interleave: bool

    @classmethod
    def of(cls, offsets: Tensor, times: int, interleave: bool) -> "RowRepeat":
        """Plan `times` copies of all rows of columns with these offsets."""
        lengths = offsets.diff()
        new = lengths.repeat_interleave(times) if interleave else lengths.repeat(times)
        bounds: list[int] = as_array(offsets).tolist()
        return cls(offsets_of(new), bounds, times, interleave)

    def take(self, values: Tensor) -> Tensor:
        """Return the repeated rows' values, flat."""
        rest = values.shape[1:]
        widths = {stop - start for start, stop in itertools.pairwise(self.bounds)}
        if not self.interleave or len(widths) == 1:
            # Of rows as wide as one another, or of all at once, this is one copy.
            blocks = values.reshape(1 if not self.interleave else len(self.bounds) - 1, 1, -1, *rest)
            return blocks.expand(-1, self.times, -1, *(-1 for _ in rest)).reshape(-1, *rest)
        source = as_array(values)
        out = torch.empty((int(self.offsets[-1]), *rest), dtype=values.dtype)
        target = as_array(out)
        for start, stop in itertools.pairwise(self.bounds):
            place = target[start * self.times : stop * self.times]
            place.reshape(self.times, stop - start, *rest)[:] = source[start:stop]
        return out


@final
class RunCuts:
    """Runs of rows that lie one behind the other. A column is cut for all of them at once when one asks for it."""

    __slots__ = ("_bounds", "_offsets", "_starts", "_whole", "parts")

    def __init__(self, whole: Mapping[str, Tensor | Ragged], starts: Sequence[int]) -> None:
        self._whole, self._starts = whole, starts
        self.parts: dict[str, Sequence[Tensor | Ragged]] = {}  # the views of each column that was asked for, one a run
        self._offsets: list[Tensor] = []  # of the per-token columns of each run
        self._bounds: tuple[int, int, list[int]] | None = None  # their first and last token, and the tokens of each run

    def column(self, name: str) -> Sequence[Tensor | Ragged]:
        """Cut a column and return its views, one a run."""
        self.parts[name] = found = self._cut(self._whole[name])
        return found

    def _cut(self, value: Tensor | Ragged) -> Sequence[Tensor | Ragged]:
        if not isinstance(value, Ragged):
            return _pieces(value, *_spans(self._starts))
        if self._bounds is None:
            rows = as_array(value.offsets)
            tokens = rows[list(self._starts)].tolist()
            self._bounds = _spans(tokens)
            self._offsets = [
                torch.as_tensor(rows[a : b + 1] - token)
                for (a, b), token in zip(itertools.pairwise(self._starts), tokens, strict=False)
            ]
        return list(map(Ragged.trusted, _pieces(value.values, *self._bounds), self._offsets))


def _spans(bounds: Sequence[int]) -> tuple[int, int, list[int]]:
    return bounds[0], bounds[-1], [b - a for a, b in itertools.pairwise(bounds)]


def _pieces(values: Tensor, start: int, stop: int, sizes: list[int]) -> Sequence[Tensor]:
    """Cut at all bounds in one call. Not by torch.split, which ends there too but takes three times as long."""
    whole = stop - start == values.shape[0]
    return torch.split_with_sizes(values if whole else values[start:stop], sizes)


@final
class RowRun(Mapping[str, Tensor | Ragged]):
    """The columns of a run of neighbouring rows. Each is cut, a view, when it is first asked for.

    A micro-batch or a row is often asked for few of its columns, and cutting all would cost more than choosing rows.
    """

    __slots__ = ("_cut", "_cuts", "_place", "_start", "_stop", "_tokens", "_whole")
    _whole: Mapping[str, Tensor | Ragged]

    def __init__(self, whole: Mapping[str, Tensor | Ragged], start: int, stop: int) -> None:
        if isinstance(whole, RowRun):
            whole, start, stop = whole._whole, whole._start + start, whole._start + stop
        self._whole, self._start, self._stop = whole, start, stop
        self._cut: dict[str, Tensor | Ragged] = {}
        self._tokens: tuple[int, int, Tensor] | None = None  # token span and offsets, which all columns share
        self._cuts: RunCuts | None = None  # shared with the other runs of one cut
        self._place = 0

    @classmethod
    def all_of(cls, whole: Mapping[str, Tensor | Ragged], starts: Sequence[int]) -> "list[RowRun]":
        """Return the runs between neighbouring `starts`, the last of which is where the last run ends."""
        if isinstance(whole, RowRun):
            whole, starts = whole._whole, [whole._start + start for start in starts]
        cuts = RunCuts(whole, starts)
        runs: list[RowRun] = []
        for place, (start, stop) in enumerate(itertools.pairwise(starts)):
            run = cls(whole, start, stop)
            run._cuts, run._place = cuts, place
            runs.append(run)
        return runs

    def __getitem__(self, name: str) -> Tensor | Ragged:
        cuts = self._cuts
        if cuts is not None:
            return (cuts.parts.get(name) or cuts.column(name))[self._place]
        found = self._cut.get(name)
        if found is None:
            found = self._cut[name] = self._cut_out(self._whole[name])
        return found

    def _cut_out(self, value: Tensor | Ragged) -> Tensor | Ragged:
        if not isinstance(value, Ragged):
            return value[self._start : self._stop]
        if self._tokens is None:
            bounds = value.offsets.numpy()
            start, stop = bounds.item(self._start), bounds.item(self._stop)
            self._tokens = (start, stop, torch.as_tensor(bounds[self._start : self._stop + 1] - start))
        start, stop, offsets = self._tokens
        return Ragged.trusted(value.values[start:stop], offsets)

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


def concat_ragged(parts: Sequence[Ragged]) -> Ragged:
    """Join rows of several ragged columns in order. Raises ValueError when their dtypes differ."""
    dtypes = {part.values.dtype for part in parts}
    if len(dtypes) > 1:
        raise ValueError(f"cannot join columns of {sorted(map(str, dtypes))}")
    lengths = torch.cat([part.lengths for part in parts])
    return Ragged.trusted(torch.cat([part.values for part in parts]), offsets_of(lengths))
