"""Batches between processes (pickle protocol 5, out of band) and on disk."""

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vrl.protocol.columns import ADVANTAGES, IMAGE_KEYS, INPUT_IDS, LOSS_MASK, POSITION_IDS, PROMPT_LENGTH, SCORE_EXTRA
from vrl.protocol.dataproto import DataProto, Meta, concat, object_column
from vrl.protocol.ragged import Ragged
from vrl.protocol.trajectory import StopReason, content_key
from vrl.protocol.wire import load_batch, save_batch

IMAGES = {content_key(blob): blob for blob in (b"\x89PNG\x00\x01", b"\xff\xd8\xff")}
EXTRAS: list[Any] = [
    {"acc": 1.0, "parts": [1, (2, 3)], "none": None},
    [1, 2],
    None,
    np.arange(4, dtype=np.int16).reshape(2, 2),
    {"array": np.array([0.1, 0.2], dtype=np.float32), "nested": {"flag": True}},
]
JSON_ITEMS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(
            st.one_of(st.text(max_size=3), st.integers(), st.sampled_from(["@tuple", "@array"])), inner, max_size=3
        ),
    ),
    max_leaves=8,
)


def full_batch() -> DataProto:
    """Return five rows, one of them without tokens, with every kind of column."""
    lengths = [3, 0, 2, 1, 4]
    ids = Ragged.from_rows([list(range(10 * i, 10 * i + n)) for i, n in enumerate(lengths)], torch.int64)
    columns = {
        INPUT_IDS: ids,
        LOSS_MASK: Ragged(ids.values % 2 == 0, ids.offsets),
        ADVANTAGES: Ragged(ids.values * 0.1, ids.offsets),
        POSITION_IDS: Ragged(ids.values[:, None].repeat(1, 3), ids.offsets),
        PROMPT_LENGTH: torch.arange(5),
        "half": Ragged(ids.values.to(torch.bfloat16), ids.offsets),
    }
    one, two = IMAGES
    objects = {SCORE_EXTRA: object_column(EXTRAS), IMAGE_KEYS: object_column([(one,), (), (two, one), (), (two,)])}
    return DataProto(columns, objects, IMAGES, Meta(global_step=7, policy_version=6, timing={"gen": 1.5}))


def same(x: Any, y: Any) -> bool:
    """Say whether two items are equal in type and value, arrays inside included."""
    if isinstance(x, np.ndarray):
        return isinstance(y, np.ndarray) and x.dtype == y.dtype and x.shape == y.shape and x.tolist() == y.tolist()
    if isinstance(x, dict):
        return isinstance(y, dict) and list(x) == list(y) and all(same(x[key], y[key]) for key in x)
    if isinstance(x, list | tuple):
        return type(x) is type(y) and len(x) == len(y) and all(same(a, b) for a, b in zip(x, y, strict=True))
    return type(x) is type(y) and x == y


def assert_equal(result: DataProto, batch: DataProto) -> None:
    assert result.names() == batch.names()
    assert (result.meta, dict(result.blobs)) == (batch.meta, dict(batch.blobs))
    for name, value in batch.columns.items():
        if isinstance(value, Ragged):
            assert torch.equal(result.ragged(name).offsets, value.offsets)
            assert result.ragged(name).values.dtype == value.values.dtype
            assert torch.equal(result.ragged(name).values, value.values)
        else:
            assert torch.equal(result.dense(name), value)
    for name, array in batch.objects.items():
        assert result.objects[name].dtype == object
        assert same(list(result.objects[name]), list(array)), name


# -- pickle ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def always_warn() -> Iterator[None]:
    """Let torch repeat warnings that it otherwise gives once a process."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


def outside(batch: DataProto) -> tuple[bytes, list[memoryview]]:
    """Pickle out of band and return read-only buffers, as an object store hands them over."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    return data, [memoryview(buffer.raw().tobytes()) for buffer in buffers]


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("rows", [slice(None), slice(1, 3), [4, 0, 0], []], ids=["all", "run", "scattered", "none"])
def test_pickle_keeps_everything(rows: Any, protocol: int) -> None:
    batch = full_batch().rows(rows)
    assert_equal(pickle.loads(pickle.dumps(batch, protocol=protocol)), batch)
    data, buffers = outside(batch)
    assert_equal(pickle.loads(data, buffers=buffers), batch)


def test_columns_leave_the_pickle_out_of_band() -> None:
    offsets = torch.arange(65) * 1024
    values = {
        INPUT_IDS: torch.arange(65536),
        ADVANTAGES: torch.ones(65536),
        "half": torch.ones(65536, dtype=torch.bfloat16),
    }
    batch = DataProto(
        {name: Ragged(value, offsets) for name, value in values.items()}, {SCORE_EXTRA: object_column(range(64))}
    )
    data, buffers = outside(batch)
    assert len(data) < 4096
    assert sum(len(buffer) for buffer in buffers) == 65536 * (8 + 4 + 2) + 65 * 8, (
        "each column once, shared offsets once"
    )
    assert [len(buffer) for buffer in outside(batch.rows(slice(8, 16)))[1]].count(8 * 1024 * 8) == 1, (
        "a part ships only itself"
    )
    ids = pickle.loads(data, buffers=buffers).ragged(INPUT_IDS).values
    addresses = {np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers}
    assert ids.data_ptr() in addresses, "loaded without a copy"


@pytest.mark.usefixtures("always_warn")
def test_read_only_columns_load_and_work_without_a_warning() -> None:
    batch = full_batch()
    data, buffers = outside(batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = pickle.loads(data, buffers=buffers)
        again = concat([*loaded.split(2), loaded.repeat(2).rows([3, 1])])
        scores = loaded.with_columns(
            advantages=Ragged(loaded.ragged(ADVANTAGES).values + 1, loaded.ragged(ADVANTAGES).offsets)
        )
        outside(loaded.rows([1, 2]))
    assert [str(warning.message) for warning in caught] == []
    assert (len(again), len(scores)) == (7, 5)
    assert_equal(loaded, batch)


def test_a_loaded_batch_can_be_sent_on() -> None:
    batch = full_batch()
    data, buffers = outside(batch)
    again, more = outside(pickle.loads(data, buffers=buffers))
    assert_equal(pickle.loads(again, buffers=more), batch)
    assert [len(buffer) for buffer in more] == [len(buffer) for buffer in buffers]


# -- disk --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [slice(None), slice(1, 3), [4, 0, 0], []], ids=["all", "run", "scattered", "none"])
def test_save_and_load(tmp_path: Path, rows: Any) -> None:
    batch = full_batch().rows(rows)
    save_batch(batch, tmp_path / "step_7" / "batch")
    assert_equal(load_batch(tmp_path / "step_7" / "batch"), batch)
    assert_equal(full_batch().rows(rows), batch)


def test_save_and_load_of_edge_cases(tmp_path: Path) -> None:
    for number, batch in enumerate(
        [
            DataProto(),
            DataProto(meta=Meta(global_step=2)),
            DataProto({}, {SCORE_EXTRA: object_column([])}),
            DataProto({}, {IMAGE_KEYS: object_column([("k",)])}, {"k": b""}),
            DataProto({"a/b c": torch.zeros(2, 0), "d": torch.tensor([1.5, float("inf")])}),
            DataProto(
                {}, {SCORE_EXTRA: object_column([np.zeros((0, 3)), np.array(["x", "yz"]), {1: "int", "1": "text"}])}
            ),
        ]
    ):
        save_batch(batch, tmp_path / str(number))
        assert_equal(load_batch(tmp_path / str(number)), batch)


@settings(deadline=None, max_examples=15, derandomize=True)
@given(st.lists(JSON_ITEMS, max_size=6))
def test_object_columns_survive_the_disk(items: list[Any]) -> None:
    with TemporaryDirectory() as folder:
        save_batch(DataProto({}, {SCORE_EXTRA: object_column(items)}), Path(folder) / "batch")
        assert same(list(load_batch(Path(folder) / "batch").objects[SCORE_EXTRA]), items)


def test_numpy_scalars_and_enums_become_what_they_mean(tmp_path: Path) -> None:
    save_batch(
        DataProto({}, {SCORE_EXTRA: object_column([np.float32(0.1), np.int64(3), StopReason.ANSWER])}),
        tmp_path / "batch",
    )
    assert list(load_batch(tmp_path / "batch").objects[SCORE_EXTRA]) == [np.float32(0.1), 3, StopReason.ANSWER]


class Foreign:
    """Something that only pickle could hold."""


@pytest.mark.parametrize("item", [Foreign(), b"bytes", {"deep": [Foreign()]}, np.array([Foreign()]), 1j])
def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path, item: Any) -> None:
    batch = DataProto({PROMPT_LENGTH: torch.arange(2)}, {SCORE_EXTRA: object_column([1, item])})
    with pytest.raises(TypeError, match=r"score_extra.*row 1"):
        save_batch(batch, tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    save_batch(full_batch(), tmp_path / "batch")
    with pytest.raises(FileExistsError):
        save_batch(DataProto(), tmp_path / "batch")
    assert_equal(load_batch(tmp_path / "batch"), full_batch())
    with pytest.raises(FileNotFoundError):
        load_batch(tmp_path / "other")
