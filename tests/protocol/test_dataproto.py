"""The batch: every operation against the same operation on a plain list of rows, and inputs that stay as they were."""

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vrl.protocol.columns import (
    ADVANTAGES,
    DATA_SOURCE,
    IMAGE_KEYS,
    INPUT_IDS,
    LOSS_MASK,
    MINI_BATCH,
    POSITION_IDS,
    PROMPT_LENGTH,
    SCORE_EXTRA,
    UID,
    VALUES,
)
from vrl.protocol.dataproto import DataProto, Meta, concat, object_column
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


# -- rows --------------------------------------------------------------------------------------------------------------


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


# -- columns -----------------------------------------------------------------------------------------------------------


@checked
@given(batches(), st.data())
def test_select_drop_and_union(batch: DataProto, data: st.DataObject) -> None:
    before = rows_of(batch)
    chosen = data.draw(st.sets(st.sampled_from(sorted(batch.names()))))
    one, two = batch.select(chosen), batch.drop(chosen)
    assert (one.names(), two.names()) == (chosen, batch.names() - chosen)
    assert dict(one.blobs) == (dict(batch.blobs) if IMAGE_KEYS in chosen else {})
    for joined in (one.union(two), two | one, batch.union(one)):
        assert joined.names() == batch.names()
        assert rows_of(joined) == before
        assert dict(joined.blobs) == dict(batch.blobs)
    assert rows_of(batch) == before


def test_union_of_equal_and_of_other_values() -> None:
    nan = torch.tensor([1.0, float("nan")])
    array = np.arange(2)
    equal: list[tuple[Any, Any]] = [
        (nan, nan.clone()),
        (torch.tensor([True, False]), torch.tensor([True, False])),
        (nan.to(torch.bfloat16), nan.to(torch.bfloat16)),
        (Ragged.from_rows([[1], []], torch.int64), Ragged.from_rows([[1], []], torch.int64)),
        (object_column([{"a": array}, [array, None]]), object_column([{"a": array.copy()}, [array.copy(), None]])),
        (object_column([float("nan"), (1,)]), object_column([float("nan"), (1,)])),
    ]
    for mine, theirs in equal:
        assert len(DataProto().with_columns(x=mine).union(DataProto().with_columns(x=theirs))) == 2
    other: list[tuple[Any, Any]] = [
        (nan, torch.tensor([1.0, 2.0])),
        (torch.ones(2), torch.ones(2, dtype=torch.int64)),
        (torch.ones(2, 1), torch.ones(2, 3)),
        (Ragged.from_rows([[1], []], torch.int64), Ragged.from_rows([[], [1]], torch.int64)),
        (object_column([{"a": array}, 0]), object_column([{"a": array + 1}, 0])),
        (object_column([{"a": array}, 0]), object_column([{"b": array}, 0])),
        (object_column([[1, 2], 0]), object_column([[1], 0])),
        (object_column([1, 2]), torch.tensor([1, 2])),
    ]
    for mine, theirs in other:
        with pytest.raises(ValueError, match="'x'"):
            DataProto().with_columns(x=mine).union(DataProto().with_columns(x=theirs))


def test_union_of_other_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 and 3 rows"):
        small().union(small(uid=["a", "b", "c"]))
    assert rows_of(DataProto().union(small())) == rows_of(small())


def test_columns_that_are_not_there() -> None:
    batch = small()
    for ask in (
        lambda: batch["uid"],
        lambda: batch.select([UID]),
        lambda: batch.drop([UID]),
        lambda: batch.ragged(UID),
    ):
        with pytest.raises(KeyError, match=r"uid.*input_ids"):
            ask()
    with pytest.raises(TypeError, match="per token"):
        batch.dense(INPUT_IDS)
    assert batch[INPUT_IDS] is batch.ragged(INPUT_IDS)


def test_with_columns_adds_and_replaces_also_by_another_kind() -> None:
    batch = small(x=[1, 2])
    changed = batch.with_columns(x=torch.tensor([3, 4]), data_source=object_column(["a", "b"]))
    assert changed.dense("x").tolist() == [3, 4]
    assert changed.names() == {INPUT_IDS, DATA_SOURCE, "x"}
    assert changed.with_columns(x=object_column([5, 6])).objects["x"].tolist() == [5, 6]
    assert batch.objects["x"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("columns", "objects", "message"),
    [
        ({PROMPT_LENGTH: torch.ones(2, dtype=torch.int64)}, {UID: object_column("abc")}, "number of rows.*'uid': 3"),
        ({PROMPT_LENGTH: torch.ones(2)}, {}, "'prompt_length' is declared int64, got torch.float32"),
        ({INPUT_IDS: torch.ones(2, 4, dtype=torch.int64)}, {}, r"'input_ids' is declared \[T\]"),
        ({PROMPT_LENGTH: Ragged.from_rows([[1]], torch.int64)}, {}, r"'prompt_length' is declared \[B\]"),
        ({UID: torch.ones(1)}, {}, "'uid' is declared object"),
        ({POSITION_IDS: Ragged.from_rows([[1]], torch.int64)}, {}, r"'position_ids' is declared \[T 3\]"),
        ({MINI_BATCH: torch.ones(2, dtype=torch.int64)}, {}, r"'mini_batch' is declared \[B E\]"),
        ({}, {UID: np.array(["a", "b"])}, "'uid' must be a 1-D object array"),
        ({}, {UID: np.empty((2, 2), dtype=object)}, "'uid' must be a 1-D object array"),
        ({}, {PROMPT_LENGTH: object_column([1])}, "'prompt_length' is declared int64"),
        ({"x": torch.ones(1)}, {"x": object_column([1])}, "'x' stands among the tensors and among the objects"),
        (
            {INPUT_IDS: Ragged.from_rows([[1], []], torch.int64), VALUES: Ragged.from_rows([[], [1.0]], torch.float32)},
            {},
            "'input_ids' and 'values' differ in their row lengths",
        ),
    ],
)
def test_columns_that_contradict_their_declaration(columns: Any, objects: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataProto(columns, objects)


def test_a_batch_is_a_value() -> None:
    source: dict[str, Any] = {"x": torch.arange(2)}
    batch = DataProto(source, {UID: object_column("ab")}, {"k": b"blob"})
    source.clear()
    assert batch.names() == {"x", UID}
    with pytest.raises(FrozenInstanceError):
        batch.meta = Meta()  # type: ignore[misc]
    for mapping in (batch.columns, batch.objects, batch.blobs, batch.rows(slice(0, 1)).columns):
        with pytest.raises(TypeError):
            mapping["y"] = 1  # type: ignore[index]
    later = batch.with_meta(global_step=5)
    assert (batch.meta.global_step, later.meta.global_step, later.names()) == (0, 5, batch.names())
