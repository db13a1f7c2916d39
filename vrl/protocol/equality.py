"""Whether two columns hold equal values, whatever is inside. Called by `DataProto.union`."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vrl.protocol.ragged import Ragged

Column = Tensor | Ragged | npt.NDArray[Any]


def equal_columns(a: Column, b: Column) -> bool:
    """Compare two columns, NaN equal to NaN. Columns of different kinds, dtypes or row lengths are never equal."""
    if isinstance(a, Ragged) and isinstance(b, Ragged):
        return torch.equal(a.offsets, b.offsets) and equal_columns(a.values, b.values)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a is b:
            return True
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return _same_bits(a, b) or (a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all()))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return len(a) == len(b) and all(map(_same_object, a, b))
    return False


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare memory, eight bytes at a time: several times faster than by element for short types.

    For integers it is equality; floats may be equal without (0.0 and -0.0), but NaN equals NaN.
    """
    per_word = max(8 // a.element_size(), 1)
    left, right = a.reshape(-1), b.reshape(-1)
    if left.storage_offset() % per_word or right.storage_offset() % per_word:
        return torch.equal(left, right)
    words = len(left) // per_word * per_word
    same = torch.equal(left[:words].view(torch.int64), right[:words].view(torch.int64))
    return same and torch.equal(left[words:], right[words:])


def _same_object(x: Any, y: Any) -> bool:
    """Compare by value, where `==` would give an array or call NaN unequal."""
    if x is y:
        return True
    if _is_array(x) or _is_array(y):
        alike = _is_array(x) and _is_array(y) and x.dtype == y.dtype and x.shape == y.shape
        return alike and all(map(_same_object, x.ravel().tolist(), y.ravel().tolist()))
    if _is_mapping(x) and _is_mapping(y):
        return x.keys() == y.keys() and all(_same_object(x[key], y[key]) for key in x)
    if _is_sequence(x) and _is_sequence(y):
        return type(x) is type(y) and len(x) == len(y) and all(map(_same_object, x, y))
    return bool(x == y) or bool(x != x and y != y)


def _is_array(item: Any) -> TypeGuard[npt.NDArray[Any]]:
    return isinstance(item, np.ndarray)


def _is_mapping(item: Any) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(item, Mapping)


def _is_sequence(item: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(item, list | tuple)
