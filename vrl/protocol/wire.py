"""Batches on disk: safetensors for tensors and blobs, JSON for object columns. No pickle of foreign data."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]  (PathLike)
from torch import Tensor

from vrl.protocol.dataproto import DataProto, Meta, object_column
from vrl.protocol.ragged import Ragged, as_array

_OFFSETS = "offsets"  # of all per-token columns; columns and blobs stand behind a prefix
_TENSORS, _TEXT = "columns.safetensors", "objects.json"


def save_batch(batch: DataProto, folder: Path) -> None:
    """Write a batch into a new folder.

    Raises FileExistsError for a folder that is there, and TypeError, before anything is written, for objects that JSON
    cannot hold. Tuples, arrays and dict keys of other types come back as they were; numpy scalars as Python numbers and
    enums of strings as strings.
    """
    objects: dict[str, list[Any]] = {}
    for name, array in batch.objects.items():
        objects[name] = [_to_json(item, f"column {name!r}, row {i}") for i, item in enumerate(array)]
    tensors: dict[str, Tensor] = {}
    per_token: list[str] = []
    for name, value in batch.columns.items():
        if isinstance(value, Ragged):
            per_token.append(name)
            tensors[_OFFSETS] = value.offsets
        tensors["column:" + name] = value.values if isinstance(value, Ragged) else value
    for key, blob in batch.blobs.items():
        tensors["blob:" + key] = torch.as_tensor(np.frombuffer(blob, dtype=np.uint8).copy())
    text = json.dumps({"per_token": per_token, "objects": objects, "meta": asdict(batch.meta)})
    folder.mkdir(parents=True)
    # Copies: safetensors refuses tensors that are views of one memory, as columns may be.
    copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(copies, folder / _TENSORS)
    (folder / _TEXT).write_text(text)


def load_batch(folder: Path) -> DataProto:
    """Read what `save_batch` wrote."""
    tensors = load_file(folder / _TENSORS)
    text = json.loads((folder / _TEXT).read_text())
    columns: dict[str, Tensor | Ragged] = {}
    blobs: dict[str, bytes] = {}
    for full_name, tensor in tensors.items():
        kind, _, name = full_name.partition(":")
        if kind == "blob":
            blobs[name] = as_array(tensor).tobytes()
        elif kind == "column":
            columns[name] = Ragged(tensor, tensors[_OFFSETS]) if name in text["per_token"] else tensor
    objects = {name: object_column(map(_from_json, items)) for name, items in text["objects"].items()}
    return DataProto(columns, objects, blobs, Meta(**text["meta"]))


def _to_json(item: Any, place: str) -> Any:
    """Return what JSON holds; what it does not know becomes a dict of one key that begins with @."""
    if item is None or isinstance(item, str | int | float):
        return item
    if isinstance(item, np.generic | np.ndarray):
        return _array_to_json(cast("npt.NDArray[Any]", item), place)
    if isinstance(item, list | tuple):
        parts = [_to_json(part, place) for part in cast("list[Any]", item)]
        return {"@tuple": parts} if isinstance(item, tuple) else parts
    if isinstance(item, Mapping):
        pairs = [(key, _to_json(part, place)) for key, part in cast("Mapping[Any, Any]", item).items()]
        if all(isinstance(key, str) and not key.startswith("@") for key, _ in pairs):
            return dict(pairs)
        return {"@dict": [[_to_json(key, place), part] for key, part in pairs]}
    raise TypeError(f"{place} holds a {type(item).__name__}, which JSON cannot hold")


def _array_to_json(array: npt.NDArray[Any], place: str) -> Any:
    if array.dtype.kind not in "biufU":
        raise TypeError(f"{place} holds an array of {array.dtype}, which JSON cannot hold")
    if isinstance(array, np.generic):
        return array.item()
    return {"@array": [str(array.dtype), list(array.shape), array.ravel().tolist()]}


def _from_json(item: Any) -> Any:
    if isinstance(item, list):
        return [_from_json(part) for part in cast("list[Any]", item)]
    if not isinstance(item, dict):
        return item
    known = cast("dict[str, Any]", item)
    if "@tuple" in known:
        return tuple(_from_json(part) for part in known["@tuple"])
    if "@array" in known:
        dtype, shape, flat = known["@array"]
        return np.array(flat, dtype=dtype).reshape(shape)
    if "@dict" in known:
        return {_from_json(key): _from_json(part) for key, part in known["@dict"]}
    return {key: _from_json(part) for key, part in known.items()}
