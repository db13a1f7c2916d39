"""Choosing, adding and joining columns of a batch; a batch is a value."""

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.batches import batches, checked, rows_of, small
from vrl.protocol.columns import (
    DATA_SOURCE,
    IMAGE_KEYS,
    INPUT_IDS,
    MINI_BATCH,
    POSITION_IDS,
    PROMPT_LENGTH,
    UID,
    VALUES,
)
from vrl.protocol.dataproto import DataProto, Meta, object_column
from vrl.protocol.ragged import Ragged


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
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
        (torch.arange(5.0)[1:3], torch.arange(1.0, 3.0)),  # not on a word's border
        (torch.arange(40) % 3 == 0, torch.arange(40) % 3 == 0),
        (Ragged.from_rows([[1], []], torch.int64), Ragged.from_rows([[1], []], torch.int64)),
        (object_column([{"a": array}, [array, None]]), object_column([{"a": array.copy()}, [array.copy(), None]])),
        (object_column([float("nan"), (1,)]), object_column([float("nan"), (1,)])),
    ]
    for mine, theirs in equal:
        assert len(DataProto().with_columns(x=mine).union(DataProto().with_columns(x=theirs))) == len(mine)
    other: list[tuple[Any, Any]] = [
        (nan, torch.tensor([1.0, 2.0])),
        (torch.ones(2), torch.ones(2, dtype=torch.int64)),
        (torch.arange(9, dtype=torch.int32), torch.arange(9, dtype=torch.int32).index_fill(0, torch.tensor(3), 0)),
        (torch.zeros(19, dtype=torch.bool), torch.arange(19) == 18),
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
