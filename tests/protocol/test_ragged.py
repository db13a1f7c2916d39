"""Ragged columns: construction, rows, padding, gathering, joining."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vrl.protocol.ragged import Ragged, RowGather, RowRepeat, concat_ragged, offsets_of

ROW_LISTS = st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=6)
checked = settings(deadline=None, max_examples=60, derandomize=True)


def ragged_of(rows: list[list[int]]) -> Ragged:
    return Ragged.from_rows(rows, torch.int64)


def rows_of(column: Ragged) -> list[list[int]]:
    return [row.tolist() for row in column.to_rows()]


@checked
@given(ROW_LISTS)
def test_from_rows_lengths_row_and_to_rows(rows: list[list[int]]) -> None:
    column = ragged_of(rows)
    assert len(column) == len(rows)
    assert rows_of(column) == rows
    assert [column.row(i).tolist() for i in range(len(rows))] == rows
    assert column.lengths.tolist() == [len(row) for row in rows]
    assert column.offsets.dtype == torch.int64
    assert column.values.dtype == torch.int64


def test_row_counts_from_the_end_and_knows_its_bounds() -> None:
    column = ragged_of([[1], [2, 3]])
    assert column.row(-1).tolist() == [2, 3]
    assert column.row(-2).tolist() == [1]
    for i in (2, -3):
        with pytest.raises(IndexError, match=f"row {i} of 2"):
            column.row(i)


def test_rows_with_trailing_dims() -> None:
    column = Ragged.from_rows([torch.ones(2, 3), torch.zeros(0, 3), torch.full((1, 3), 2.0)], torch.float32)
    assert tuple(column.values.shape) == (3, 3)
    assert column.lengths.tolist() == [2, 0, 1]
    assert tuple(column.to_padded().shape) == (3, 2, 3)
    assert torch.equal(Ragged.from_padded(column.to_padded(), column.lengths).values, column.values)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (torch.tensor([0, 2], dtype=torch.int32), "int64"),
        (torch.tensor([[0, 3]]), "int64"),
        (torch.zeros(0, dtype=torch.int64), "int64"),
        (torch.tensor([0, 2]), "end at 2 but there are 3"),
        (torch.tensor([1, 3]), "start at 1"),
        (torch.tensor([0, 2, 1, 3]), "decrease"),
    ],
)
def test_wrong_offsets_are_refused(offsets: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ragged(torch.zeros(3), offsets)


@checked
@given(ROW_LISTS)
def test_padded_and_back(rows: list[list[int]]) -> None:
    column = ragged_of(rows)
    padded = column.to_padded(fill=-1)
    width = max((len(row) for row in rows), default=0)
    assert padded.tolist() == [row + [-1] * (width - len(row)) for row in rows]
    assert rows_of(Ragged.from_padded(padded, column.lengths)) == rows


def test_from_padded_refuses_lengths_beyond_the_width() -> None:
    with pytest.raises(ValueError, match="5"):
        Ragged.from_padded(torch.zeros(2, 3), torch.tensor([2, 5]))


@checked
@given(ROW_LISTS, st.data())
def test_take_equals_the_list_of_rows(rows: list[list[int]], data: st.DataObject) -> None:
    column = ragged_of(rows)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9)) if rows else []
    before = column.values.clone()
    gather = RowGather.of(column.offsets, torch.tensor(chosen, dtype=torch.int64))
    assert rows_of(column.take(gather)) == [rows[i] for i in chosen]
    assert torch.equal(column.values, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int32])
@pytest.mark.parametrize("length", [1, 3, 500])  # short and long rows are gathered differently
def test_take_scattered_rows_of_every_dtype(dtype: torch.dtype, length: int) -> None:
    rows = [torch.arange(length + i).remainder(7).to(dtype) for i in range(5)]
    column = Ragged.from_rows(rows, dtype)
    for order in ([4, 0, 0, 2], [3, 4, 1, 2], [0, 1, 4]):
        taken = column.take(RowGather.of(column.offsets, torch.tensor(order)))
        assert taken.values.dtype == dtype
        assert all(torch.equal(row, rows[i]) for row, i in zip(taken.to_rows(), order, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("lengths", [[3, 3], [0, 0], [2, 0, 5], [4], []])
@pytest.mark.parametrize("width", [(), (2,)])
def test_repeated_rows_of_every_dtype(dtype: torch.dtype, lengths: list[int], width: tuple[int, ...]) -> None:
    offsets = offsets_of(torch.tensor(lengths, dtype=torch.int64))
    values = torch.arange(sum(lengths) * (2 if width else 1)).reshape(sum(lengths), *width).remainder(5).to(dtype)
    rows = Ragged(values, offsets).to_rows()
    for times in (0, 1, 3):
        for interleave, wanted in ((True, [row for row in rows for _ in range(times)]), (False, [*rows] * times)):
            repeated = Ragged(values, offsets).take(RowRepeat.of(offsets, times, interleave))
            assert repeated.values.dtype == dtype
            assert len(repeated) == len(wanted)
            assert all(torch.equal(row, other) for row, other in zip(repeated.to_rows(), wanted, strict=True))


def test_neighbouring_rows_are_a_view_and_others_a_copy() -> None:
    column = ragged_of([[1], [2, 3], [4], [5, 6]])
    view = column.take(RowGather.of(column.offsets, torch.tensor([1, 2])))
    assert view.values.data_ptr() == column.values[1:].data_ptr()
    assert view.offsets.tolist() == [0, 2, 3]
    copy = column.take(RowGather.of(column.offsets, torch.tensor([3, 1])))
    copy.values.zero_()
    assert rows_of(column) == [[1], [2, 3], [4], [5, 6]]


@checked
@given(st.lists(ROW_LISTS, min_size=1, max_size=4))
def test_concat_joins_rows_in_order(parts: list[list[list[int]]]) -> None:
    columns = [ragged_of(rows) for rows in parts]
    assert rows_of(concat_ragged(columns)) == [row for rows in parts for row in rows]
    assert [rows_of(column) for column in columns] == parts


def test_concat_of_different_dtypes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float32.*int64|int64.*float32"):
        concat_ragged([ragged_of([[1]]), Ragged.from_rows([[1.0]], torch.float32)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_offsets_of_lengths(dtype: torch.dtype) -> None:
    offsets = offsets_of(torch.tensor([2, 0, 3], dtype=dtype))
    assert offsets.tolist() == [0, 2, 2, 5]
    assert offsets.dtype == torch.int64
    assert offsets_of(torch.zeros(0, dtype=dtype)).tolist() == [0]


def test_a_ragged_column_is_a_value() -> None:
    column = ragged_of([[1]])
    with pytest.raises(AttributeError):
        column.values = torch.zeros(1)  # type: ignore[misc]
