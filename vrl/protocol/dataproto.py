"""The batch: `DataProto(columns, objects, blobs, meta)`, a value. Every operation returns a new one.

Made by the rollout worker, passed by the driver between worker groups, cut by the dispatch rules, eaten by the learner.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, final, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vrl.protocol.columns import COLUMNS, IMAGE_KEYS
from vrl.protocol.equality import equal_columns
from vrl.protocol.ragged import Ragged, RowGather, RowRepeat, RowRun, as_array, concat_ragged

ObjectArray = npt.NDArray[Any]  # 1-D, dtype object
RowIndex = npt.NDArray[np.int64]
Rows = slice | Sequence[int] | Tensor | npt.NDArray[Any]
Columns = Mapping[str, Tensor | Ragged]
Objects = Mapping[str, ObjectArray]
_FROZEN = (MappingProxyType, RowRun)  # mappings that nobody writes to
WireColumn = tuple[npt.NDArray[Any], bool, bool]  # memory, is bfloat16, is per token


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What a batch knows about its origin. Never configuration."""

    global_step: int = 0
    policy_version: int = 0
    timing: Mapping[str, float] = field(
        default_factory=dict[str, float]
    )  # seconds by stage; the longest rank's on concat


@final
@dataclass(frozen=True, slots=True, eq=False)
class DataProto:
    """Rows of a step.

    `columns`: dense tensors `[B, ...]` or `Ragged`; `objects`: 1-D numpy object arrays of length B;
    `blobs`: encoded images by content hash, named by rows in the object column `image_keys`.
    Raises ValueError when lengths or dtypes contradict the declaration of a column.
    """

    columns: Columns = field(default_factory=dict[str, Tensor | Ragged])
    objects: Objects = field(default_factory=dict[str, ObjectArray])
    blobs: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    meta: Meta = field(default_factory=Meta)

    def __post_init__(self) -> None:
        lengths = {name: len(value) for name, value in (*self.columns.items(), *self.objects.items())}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of one batch differ in their number of rows: {lengths}")
        for name, value in self.columns.items():
            _check_tensor(name, value)
            if name in self.objects:
                raise ValueError(f"column {name!r} stands among the tensors and among the objects")
        for name, array in self.objects.items():
            _check_objects(name, array)
        object.__setattr__(self, "columns", MappingProxyType(_share_offsets(self.columns)))
        object.__setattr__(self, "objects", MappingProxyType(dict(self.objects)))
        object.__setattr__(self, "blobs", MappingProxyType(dict(self.blobs)))

    @classmethod
    def trusted(cls, columns: Columns, objects: Objects, blobs: Mapping[str, bytes], meta: Meta) -> "DataProto":
        """Build from parts of batches that were checked before: checks cost more than choosing rows."""
        new = object.__new__(cls)
        for name, value in (("columns", columns), ("objects", objects), ("blobs", blobs)):
            object.__setattr__(new, name, value if isinstance(value, _FROZEN) else MappingProxyType(value))
        object.__setattr__(new, "meta", meta)
        return new

    def __len__(self) -> int:
        for array in self.objects.values():
            return len(array)
        for value in self.columns.values():
            return len(value)
        return 0

    def __contains__(self, name: str) -> bool:
        return name in self.columns or name in self.objects

    def names(self) -> set[str]:
        """Return the names of all columns."""
        return {*self.columns, *self.objects}

    def ragged(self, name: str) -> Ragged:
        """Return a per-token column."""
        value = self[name]
        if not isinstance(value, Ragged):
            raise TypeError(f"column {name!r} is not per token")
        return value

    def dense(self, name: str) -> Tensor:
        """Return a per-row tensor column."""
        value = self[name]
        if not isinstance(value, Tensor):
            kind = "per token" if isinstance(value, Ragged) else "an object column"
            raise TypeError(f"column {name!r} is {kind}, not dense")
        return value

    # -- choosing columns ---------------------------------------------------------------------------------------

    def select(self, names: Iterable[str]) -> "DataProto":
        """Keep the named columns; a name that is not there is an error. Blobs stay only with `image_keys`."""
        wanted = list(names)
        for name in wanted:
            if name not in self:
                raise self._absent(name)
        columns = {name: self.columns[name] for name in wanted if name in self.columns}
        objects = {name: self.objects[name] for name in wanted if name in self.objects}
        return DataProto.trusted(columns, objects, self.blobs if IMAGE_KEYS in objects else {}, self.meta)

    def drop(self, names: Iterable[str]) -> "DataProto":
        """Leave the named columns out; a name that is not there is an error."""
        unwanted = set(names)
        for name in unwanted - self.names():
            raise self._absent(name)
        return self.select(name for name in (*self.columns, *self.objects) if name not in unwanted)

    def with_columns(self, **values: Tensor | Ragged | ObjectArray) -> "DataProto":
        """Return a batch with columns added or replaced."""
        kept = {name: value for name, value in self.columns.items() if name not in values}
        kept_objects = {name: array for name, array in self.objects.items() if name not in values}
        objects = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        columns = {name: value for name, value in values.items() if not isinstance(value, np.ndarray)}
        return DataProto(kept | columns, kept_objects | objects, self.blobs, self.meta)

    def with_meta(self, **values: Any) -> "DataProto":
        """Return the batch with fields of its meta replaced."""
        return DataProto.trusted(self.columns, self.objects, self.blobs, replace(self.meta, **values))

    def union(self, other: "DataProto") -> "DataProto":
        """Join the columns of two batches of the same rows. A name in both must hold equal values."""
        if self.names() and other.names() and len(self) != len(other):
            raise ValueError(f"union of {len(self)} and {len(other)} rows")
        for name in self.names() & other.names():
            if not equal_columns(self[name], other[name]):
                raise ValueError(f"union: column {name!r} stands in both batches with different values")
        return DataProto.trusted(
            _share_offsets({**self.columns, **other.columns}),
            {**self.objects, **other.objects},
            {**self.blobs, **other.blobs},
            replace(self.meta, timing={**self.meta.timing, **other.meta.timing}),
        )

    def __or__(self, other: "DataProto") -> "DataProto":
        return self.union(other)

    def _absent(self, name: str) -> KeyError:
        return KeyError(f"no column {name!r}; there are {sorted(self.names())}")

    # -- choosing rows ------------------------------------------------------------------------------------------

    def rows(self, which: Rows) -> "DataProto":
        """Return the rows of a slice, an index list or a boolean mask, in that order; blobs are pruned to them.

        Neighbouring rows are views of this batch's columns, others are copied.
        """
        count = len(self)
        if isinstance(which, slice):
            start, stop, step = which.indices(count)
            if step == 1:
                return self._run(start, max(start, stop))
            return self._gather(np.arange(count)[which].copy())
        return self._gather(_row_index(which, count))

    @overload
    def __getitem__(self, which: str) -> Tensor | Ragged | ObjectArray: ...
    @overload
    def __getitem__(self, which: Rows) -> "DataProto": ...
    def __getitem__(self, which: str | Rows) -> "DataProto | Tensor | Ragged | ObjectArray":
        if not isinstance(which, str):
            return self.rows(which)
        if which in self.columns:
            return self.columns[which]
        if which in self.objects:
            return self.objects[which]
        raise self._absent(which)

    def _run(self, start: int, stop: int) -> "DataProto":
        return self._cut(RowRun(self.columns, start, stop), start, stop)

    def _runs(self, starts: Sequence[int]) -> list["DataProto"]:
        runs = RowRun.all_of(self.columns, starts)
        return [self._cut(run, *bounds) for run, bounds in zip(runs, pairwise(starts), strict=True)]

    def _cut(self, columns: RowRun, start: int, stop: int) -> "DataProto":
        objects = {name: array[start:stop] for name, array in self.objects.items()}
        return DataProto.trusted(columns, objects, _prune(self.blobs, objects), self.meta)

    def _gather(self, index: RowIndex, plan: Callable[[Tensor], RowRepeat] | None = None) -> "DataProto":
        """Return the rows of an index; `plan` makes the gather of per-token columns where it is no common one."""
        if len(index) and index[-1] - index[0] == len(index) - 1 and bool((np.diff(index) == 1).all()):
            return self._run(int(index[0]), int(index[-1]) + 1)
        rows = torch.as_tensor(index)
        gather: RowGather | RowRepeat | None = None  # one for all per-token columns: they share their offsets
        columns: dict[str, Tensor | Ragged] = {}
        for name, value in self.columns.items():
            if isinstance(value, Ragged):
                gather = gather or (plan(value.offsets) if plan else RowGather.of(value.offsets, rows))
                columns[name] = value.take(gather)
            else:
                columns[name] = value.index_select(0, rows)
        objects = {name: array[index] for name, array in self.objects.items()}
        return DataProto.trusted(columns, objects, _prune(self.blobs, objects), self.meta)

    def chunk(self, parts: int) -> list["DataProto"]:
        """Cut into `parts` runs of rows whose sizes differ by at most one; some may be empty."""
        if parts < 1:
            raise ValueError(f"cannot cut {len(self)} rows into {parts} parts")
        base, extra = divmod(len(self), parts)
        return self._runs([i * base + min(i, extra) for i in range(parts + 1)])

    def split(self, size: int) -> list["DataProto"]:
        """Cut into runs of `size` rows; the last may be shorter."""
        if size < 1:
            raise ValueError(f"cannot cut {len(self)} rows into parts of {size}")
        count = len(self)
        return self._runs([*range(0, count, size), count]) if count else []

    def repeat(self, times: int, interleave: bool = True) -> "DataProto":
        """Repeat rows: a a b b (interleaved) or a b a b. Blobs are shared."""
        if times < 0:
            raise ValueError(f"cannot repeat rows {times} times")
        index = np.arange(len(self))
        repeated = np.repeat(index, times) if interleave else np.tile(index, times)
        return self._gather(repeated, lambda offsets: RowRepeat.of(offsets, times, interleave))

    def reorder(self, order: Sequence[int] | Tensor) -> tuple["DataProto", Tensor]:
        """Return the rows in `order` (a permutation) and the inverse permutation that undoes it."""
        index = np.asarray(as_array(order) if isinstance(order, Tensor) else order, dtype=np.int64)
        identity = np.arange(len(self))
        if not np.array_equal(np.sort(index), identity):
            raise ValueError(f"order must be a permutation of {len(self)} rows")
        inverse = np.empty_like(identity)
        inverse[index] = identity
        return self._gather(index), torch.as_tensor(inverse)

    # -- sizes --------------------------------------------------------------------------------------------------

    def nbytes(self) -> int:
        """Bytes of tensors and blobs (object columns are not counted)."""
        total = sum(len(blob) for blob in self.blobs.values())
        offsets = 0  # shared by all per-token columns
        for value in self.columns.values():
            total += (value.values if isinstance(value, Ragged) else value).nbytes
            offsets = value.offsets.nbytes if isinstance(value, Ragged) else offsets
        return total + offsets

    # -- wire ---------------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Callable[..., "DataProto"], tuple[Any, ...]]:
        # Numpy arrays leave pickle protocol 5 as out-of-band buffers, so that Ray hands columns over without a copy.
        columns: dict[str, WireColumn] = {}
        offsets: npt.NDArray[Any] | None = None
        for name, value in self.columns.items():
            flat = value.values if isinstance(value, Ragged) else value
            columns[name] = (as_array(flat), flat.dtype is torch.bfloat16, isinstance(value, Ragged))
            if offsets is None and isinstance(value, Ragged):
                offsets = as_array(value.offsets)
        return _from_wire, (columns, offsets, dict(self.objects), dict(self.blobs), self.meta)


def concat(parts: Sequence[DataProto]) -> DataProto:
    """Join the rows of batches with equal columns; blobs unite, of each timing the longest stays.

    Batches without rows add nothing but their timing, whatever columns they have.
    """
    if not parts:
        raise ValueError("concat of no batch")
    filled = [part for part in parts if len(part)] or [parts[0]]
    kinds = _kinds(filled[0])
    for part in filled[1:]:
        for name in sorted(kinds.items() ^ _kinds(part).items()):
            raise ValueError(f"concat: not all batches have a column {name[0]!r} that is {name[1]}")
    columns: dict[str, Tensor | Ragged] = {}
    offsets: Tensor | None = None  # of all per-token columns
    for name, value in filled[0].columns.items():
        if not isinstance(value, Ragged):
            columns[name] = torch.cat([part.dense(name) for part in filled])
        elif offsets is None:
            columns[name] = joined = concat_ragged([part.ragged(name) for part in filled])
            offsets = joined.offsets
        else:
            columns[name] = Ragged.trusted(torch.cat([part.ragged(name).values for part in filled]), offsets)
    objects = {name: np.concatenate([part.objects[name] for part in filled]) for name in filled[0].objects}
    blobs = {key: blob for part in filled for key, blob in part.blobs.items()}
    timing: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.meta.timing.items():
            timing[name] = max(seconds, timing.get(name, 0.0))
    return DataProto.trusted(columns, objects, blobs, replace(filled[0].meta, timing=timing))


def object_column(values: Iterable[Any]) -> ObjectArray:
    """Return a 1-D object array, whatever is inside (lists of equal length stay lists)."""
    items = list(values)
    out = np.empty(len(items), dtype=object)
    for i, item in enumerate(items):
        out[i] = item
    return out


def _check_tensor(name: str, value: Tensor | Ragged) -> None:
    spec = COLUMNS.get(name)
    if spec is None:
        return
    flat = value.values if isinstance(value, Ragged) else value
    if str(flat.dtype) != f"torch.{spec.dtype}":
        raise ValueError(f"column {name!r} is declared {spec.dtype}, got {flat.dtype}")
    axes = spec.shape.split()
    if (axes[0] == "T") != isinstance(value, Ragged) or len(axes) != flat.dim():
        raise ValueError(f"column {name!r} is declared [{spec.shape}], got {type(value).__name__} {tuple(flat.shape)}")


def _check_objects(name: str, array: ObjectArray) -> None:
    if array.dtype != object or array.ndim != 1:
        raise ValueError(f"object column {name!r} must be a 1-D object array, got {array.dtype} {array.shape}")
    spec = COLUMNS.get(name)
    if spec is not None and spec.dtype != "object":
        raise ValueError(f"column {name!r} is declared {spec.dtype}, got objects")


def _share_offsets(columns: Columns) -> dict[str, Tensor | Ragged]:
    """Let all per-token columns hold one offsets tensor. Raises ValueError when their row lengths differ."""
    shared = dict(columns)
    first: tuple[str, Tensor] | None = None
    for name, value in columns.items():
        if not isinstance(value, Ragged):
            continue
        first = first or (name, value.offsets)
        if value.offsets is first[1]:
            continue
        if not torch.equal(value.offsets, first[1]):
            raise ValueError(f"per-token columns {first[0]!r} and {name!r} differ in their row lengths")
        shared[name] = Ragged.trusted(value.values, first[1])
    return shared


def _kinds(batch: DataProto) -> dict[str, str]:
    tensors = {
        name: f"{value.values.dtype} per token" if isinstance(value, Ragged) else f"{value.dtype} per row"
        for name, value in batch.columns.items()
    }
    return tensors | dict.fromkeys(batch.objects, "an object per row")


def _row_index(which: Sequence[int] | Tensor | npt.NDArray[Any], count: int) -> RowIndex:
    index = which.numpy() if isinstance(which, Tensor) else np.asarray(which)
    if index.dtype == np.bool_:
        if len(index) != count:
            raise IndexError(f"a mask of {len(index)} entries on {count} rows")
        return np.flatnonzero(index)
    if index.size and index.dtype.kind not in "iu":
        raise IndexError(f"rows are chosen by integers or a mask, not by {index.dtype}")
    index = index.astype(np.int64).reshape(-1)
    wrong = index[(index < -count) | (index >= count)]
    if wrong.size:
        raise IndexError(f"row {wrong[0]} of {count}")
    return np.where(index < 0, index + count, index)


def _prune(blobs: Mapping[str, bytes], objects: Objects) -> Mapping[str, bytes]:
    if not blobs or IMAGE_KEYS not in objects:
        return blobs
    wanted = {key for keys in objects[IMAGE_KEYS] for key in keys}
    return {key: blob for key, blob in blobs.items() if key in wanted}


def _from_wire(
    columns: dict[str, WireColumn],
    offsets: npt.NDArray[Any] | None,
    objects: dict[str, ObjectArray],
    blobs: dict[str, bytes],
    meta: Meta,
) -> DataProto:
    with warnings.catch_warnings():  # read-only is meant: a batch is a value and is never written to
        warnings.simplefilter("ignore", UserWarning)
        shared = None if offsets is None else torch.as_tensor(offsets)
        flat = {name: torch.as_tensor(array) for name, (array, _, _) in columns.items()}
    tensors: dict[str, Tensor | Ragged] = {}
    for name, (_, is_bfloat16, is_ragged) in columns.items():
        values = flat[name].view(torch.bfloat16) if is_bfloat16 else flat[name]
        tensors[name] = Ragged.trusted(values, shared) if is_ragged and shared is not None else values
    return DataProto.trusted(tensors, objects, blobs, meta)
