"""Random and small batches, and a batch as a plain list of rows: what the tests of DataProto share."""

from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from vrl.protocol.columns import (
    ADVANTAGES,
    IMAGE_KEYS,
    INPUT_IDS,
    LOSS_MASK,
    MINI_BATCH,
    POSITION_IDS,
    PROMPT_LENGTH,
    SCORE_EXTRA,
    UID,
)
from vrl.protocol.dataproto import DataProto, Meta, object_column
from vrl.protocol.ragged import Ragged, offsets_of

BLOBS = {"k0": b"zero", "k1": b"one", "k2": b"two"}
ITEMS = st.one_of(
    st.none(),
    st.lists(st.integers(0, 9), min_size=2, max_size=2),
    st.dictionaries(st.sampled_from("ab"), st.integers(0, 9), max_size=2),
    st.tuples(st.integers(0, 9), st.text("xy", max_size=2)),
    st.text("xyz", max_size=3),
    st.lists(st.integers(0, 9), min_size=2, max_size=2).map(np.array),
)
checked = settings(deadline=None, max_examples=60, derandomize=True)


def plain(item: Any) -> Any:
    """Return something that compares by value: arrays become tagged lists."""
    if isinstance(item, np.ndarray):
        return ("array", str(item.dtype), item.tolist())
    return item


def rows_of(batch: DataProto) -> list[dict[str, Any]]:
    """Return the batch as a list of rows, blobs included."""
    rows: list[dict[str, Any]] = [{} for _ in range(len(batch))]
    for name, value in batch.columns.items():
        cells = [cell.tolist() for cell in value.to_rows()] if isinstance(value, Ragged) else value.tolist()
        for row, cell in zip(rows, cells, strict=True):
            row[name] = cell
    for name, array in batch.objects.items():
        for row, cell in zip(rows, array, strict=True):
            row[name] = plain(cell)
    for row in rows:
        row["images"] = [batch.blobs[key] for key in row.get(IMAGE_KEYS, ())]
    return rows


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 0) -> DataProto:
    count = draw(st.integers(min_rows, 6))
    lengths = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)), dtype=torch.int64)
    offsets, base = offsets_of(lengths), draw(st.integers(0, 50))
    total = int(offsets[-1])
    flat = torch.arange(base, base + total)
    columns = {
        INPUT_IDS: Ragged(flat, offsets),
        LOSS_MASK: Ragged(flat % 3 == 0, offsets.clone()),
        ADVANTAGES: Ragged(flat * 0.5, offsets),
        POSITION_IDS: Ragged(torch.stack([flat, flat + 1, flat + 2], 1), offsets),
        PROMPT_LENGTH: torch.arange(count) + base,
        MINI_BATCH: torch.arange(2 * count).reshape(count, 2),
    }
    objects = {
        UID: object_column(f"draw-{base}-{i // 2}" for i in range(count)),
        SCORE_EXTRA: object_column(draw(st.lists(ITEMS, min_size=count, max_size=count))),
    }
    meta, blobs = Meta(global_step=3, timing={"gen": float(base)}), {}
    if draw(st.booleans()):
        keys = draw(
            st.lists(st.lists(st.sampled_from(sorted(BLOBS)), max_size=3).map(tuple), min_size=count, max_size=count)
        )
        objects[IMAGE_KEYS] = object_column(keys)
        blobs = {key: BLOBS[key] for key in sorted({key for row in keys for key in row})}
    return DataProto(columns, objects, blobs, meta)


def small(**objects: list[Any]) -> DataProto:
    count = len(next(iter(objects.values()))) if objects else 2
    ids = Ragged.from_rows([[10 * i, 10 * i + 1] for i in range(count)], torch.int64)
    return DataProto({INPUT_IDS: ids}, {name: object_column(values) for name, values in objects.items()})
