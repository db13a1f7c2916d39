"""The batch: every operation against the same operation on a plain list of rows, and inputs that stay as they were."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.batches import batches, checked, plain, rows_of, small
from vrl.protocol.columns import (
    IMAGE_KEYS,
    INPUT_IDS,
    SCORE_EXTRA,
    UID,
)
from vrl.protocol.dataproto import DataProto, Meta, concat, object_column
from vrl.protocol.ragged import Ragged


@checked
@given(batches(), st.data())
def test_rows_by_slice_index_list_and_mask(batch: DataProto, data: st.DataObject) -> None:
    before, count = rows_of(batch), len(batch)
    cut = data.draw(st.slices(count))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=bool)
    index = data.draw(st.lists(st.integers(-count, count - 1), max_size=8)) if count else []
    expected = {
        "slice": (cut, before[cut]),
        "mask array": (mask, [row for row, keep in zip(before, mask, strict=True) if keep]),
        "mask tensor": (torch.from_numpy(mask), [row for row, keep in zip(before, mask, strict=True) if keep]),
        "index list": (index, [before[i] for i in index]),
        "index tensor": (torch.tensor(index, dtype=torch.int64), [before[i] for i in index]),
        "index array": (np.array(index, dtype=np.int32), [before[i] for i in index]),
    }
    for kind, (which, rows) in expected.items():
        result = batch.rows(which)
        assert rows_of(result) == rows, kind
        assert len(result) == len(rows)
        assert (result.names(), result.meta) == (batch.names(), batch.meta)
        if IMAGE_KEYS in batch:
            assert set(result.blobs) == {key for row in rows for key in row[IMAGE_KEYS]}, "blobs are pruned to the rows"
        assert rows_of(batch[which]) == rows
    assert rows_of(batch) == before


@checked
@given(batches(), st.data())
def test_rows_of_rows(batch: DataProto, data: st.DataObject) -> None:
    first = data.draw(st.slices(len(batch)))
    half = batch.rows(first)
    second = data.draw(st.slices(len(half)))
    assert rows_of(half.rows(second)) == rows_of(batch)[first][second]
    order = data.draw(st.permutations(range(len(half))))
    assert rows_of(half.rows(order)) == [rows_of(half)[i] for i in order]


def test_a_run_of_rows_is_a_view_of_the_columns() -> None:
    batch = small(uid=["a", "b", "c"])
    part = batch.rows(slice(1, 3))
    assert part.ragged(INPUT_IDS).values.data_ptr() == batch.ragged(INPUT_IDS).values[2:].data_ptr()
    assert part.ragged(INPUT_IDS) is part.ragged(INPUT_IDS)


@pytest.mark.parametrize(
    "cut",
    [slice(4, 2), slice(-1, -3), slice(None, None, -1), slice(None, None, 2), slice(3, 99), slice(1, None, 2**70)],
)
def test_odd_slices(cut: slice) -> None:
    batch = small(uid=list("abcdef"))
    assert batch.rows(cut).objects[UID].tolist() == list("abcdef")[cut]
    assert rows_of(batch.rows(cut)) == rows_of(batch)[cut]


@pytest.mark.parametrize(("which", "name"), [([2], "2"), ([-3], "-3"), (torch.tensor([0, 5]), "5")])
def test_a_row_that_is_not_there(which: Any, name: str) -> None:
    with pytest.raises(IndexError, match=f"row {name} of 2"):
        small().rows(which)


def test_masks_of_another_length_and_fractions_are_refused() -> None:
    with pytest.raises(IndexError, match="3 entries on 2 rows"):
        small().rows(np.array([True, False, True]))
    with pytest.raises((IndexError, TypeError, ValueError), match="float"):
        small().rows(np.array([0.5, 1.0]))


# -- concat, chunk, split, repeat, reorder -----------------------------------------------------------------------------


@checked
@given(batches(), st.integers(1, 8))
def test_chunk_and_concat(batch: DataProto, parts: int) -> None:
    before = rows_of(batch)
    cut = batch.chunk(parts)
    sizes = [len(part) for part in cut]
    assert len(cut) == parts
    assert max(sizes) - min(sizes) <= 1
    assert [row for part in cut for row in rows_of(part)] == before
    joined = concat(cut)
    assert (rows_of(joined), joined.meta, dict(joined.blobs)) == (before, batch.meta, dict(batch.blobs))
    assert rows_of(batch) == before


@checked
@given(batches(), st.integers(1, 8))
def test_split_and_concat(batch: DataProto, size: int) -> None:
    before = rows_of(batch)
    cut = batch.split(size)
    assert [len(part) for part in cut[:-1]] == [size] * (len(cut) - 1)
    assert [rows_of(part) for part in cut] == [before[i : i + size] for i in range(0, len(before), size)]
    if cut:
        assert rows_of(concat(cut)) == before


@checked
@given(st.lists(batches(), min_size=1, max_size=4), st.booleans())
def test_concat_equals_the_joined_lists(parts: list[DataProto], images: bool) -> None:
    if images:
        parts = [
            part if IMAGE_KEYS in part else part.with_columns(image_keys=object_column([()] * len(part)))
            for part in parts
        ]
    else:
        parts = [part.drop([IMAGE_KEYS]) if IMAGE_KEYS in part else part for part in parts]
    before = [rows_of(part) for part in parts]
    joined = concat(parts)
    assert rows_of(joined) == [row for rows in before for row in rows]
    assert joined.meta.timing == {"gen": max(part.meta.timing["gen"] for part in parts)}
    assert [rows_of(part) for part in parts] == before


@checked
@given(batches(), st.integers(0, 4))
def test_repeat(batch: DataProto, times: int) -> None:
    before = rows_of(batch)
    assert rows_of(batch.repeat(times)) == [row for row in before for _ in range(times)]
    assert rows_of(batch.repeat(times, interleave=False)) == before * times
    assert rows_of(batch) == before


@checked
@given(batches(), st.data())
def test_reorder_and_its_inverse(batch: DataProto, data: st.DataObject) -> None:
    before = rows_of(batch)
    order = data.draw(st.permutations(range(len(batch))))
    for given_order in (order, torch.tensor(order, dtype=torch.int64)):
        result, inverse = batch.reorder(given_order)
        assert rows_of(result) == [before[i] for i in order]
        back, again = result.reorder(inverse)
        assert rows_of(back) == before
        assert again.tolist() == list(order)
    assert rows_of(batch) == before


@pytest.mark.parametrize("order", [[0, 0], [0], [1, 2], [0, 1, 2]])
def test_reorder_takes_permutations_only(order: list[int]) -> None:
    with pytest.raises(ValueError, match="permutation of 2 rows"):
        small().reorder(order)


@pytest.mark.parametrize(
    "cut",
    [lambda b: b.chunk(0), lambda b: b.chunk(-1), lambda b: b.split(0), lambda b: b.split(-2), lambda b: b.repeat(-1)],
)
def test_counts_that_make_no_sense(cut: Any) -> None:
    with pytest.raises(ValueError, match=r"\b0\b|-1|-2"):
        cut(small())


def test_concat_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="no batch"):
        concat([])
    with pytest.raises(ValueError, match="uid"):
        concat([small(), small(uid=["a"])])
    dense, floats = DataProto({"x": torch.ones(1)}), DataProto({"x": torch.ones(1, dtype=torch.float64)})
    for other in (
        small(),
        floats,
        DataProto({"x": Ragged.from_rows([[1.0]], torch.float32)}),
        DataProto({}, {"x": object_column("a")}),
    ):
        with pytest.raises(ValueError, match="concat"):
            concat([dense, other])


def test_parts_without_rows_add_nothing_whatever_columns_they_have() -> None:
    batch = small(uid=["a", "b"])
    joined = concat([DataProto(), batch.rows([]), batch, DataProto(meta=Meta(timing={"gen": 2.0}))])
    assert rows_of(joined) == rows_of(batch)
    assert joined.meta.timing == {"gen": 2.0}
    nothing = concat([batch.rows([]), batch.rows([])])
    assert (len(nothing), nothing.names()) == (0, batch.names())


@pytest.mark.parametrize(
    "values",
    [
        [[1, 2], [3, 4]],
        [{"a": 1}, {"b": [2]}],
        [None, None],
        [np.arange(3), np.arange(3)],
        [np.arange(2), np.arange(3)],
        [np.array(1.0), np.float32(2)],
        [(), (1,)],
        [[[1], [2]], [[3], [4]]],
        ["text", None],
    ],
)
def test_object_columns_stay_one_dimensional(values: list[Any]) -> None:
    batch = small(score_extra=values)
    wanted = [plain(value) for value in values]
    results = {
        "column": (batch, wanted),
        "concat": (concat([batch, batch]), wanted * 2),
        "repeat": (batch.repeat(2), [wanted[0], wanted[0], wanted[1], wanted[1]]),
        "split": (concat(batch.split(1)), wanted),
        "one row": (batch.rows([1]), wanted[1:]),
        "select": (batch.select([SCORE_EXTRA]), wanted),
        "reorder": (batch.reorder([1, 0])[0], wanted[::-1]),
    }
    for operation, (result, expected) in results.items():
        column = result.objects[SCORE_EXTRA]
        assert (column.dtype, column.shape) == (np.dtype(object), (len(expected),)), operation
        assert [plain(value) for value in column] == expected, operation
