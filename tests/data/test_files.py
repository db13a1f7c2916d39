"""Reading and writing the rows of data files."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vrl.data.files import open_table, write_parquet
from vrl.protocol.errors import DataError


def test_parquet_rows_across_batches_and_row_groups(tmp_path):
    path = tmp_path / "a.parquet"
    values = [{"n": i, "text": f"t{i}", "nested": {"index": i, "list": [i, i + 1]}} for i in range(1000)]
    pq.write_table(pa.Table.from_pylist(values), path, row_group_size=300)
    table = open_table(path)
    assert len(table) == 1000
    assert [table.row(i) for i in range(1000)] == values
    assert table.values("nested", "index") == list(range(1000))
    assert table.values("n") == list(range(1000))
    assert table.values("nested", "absent") == table.values("absent") == table.values("n", "index") == [None] * 1000


def test_parquet_with_categories_that_differ_from_batch_to_batch(tmp_path):
    path = tmp_path / "a.parquet"
    names = [f"source {i // 100}" for i in range(600)]
    pq.write_table(pa.table({"s": pa.array(names).dictionary_encode()}), path, row_group_size=200)
    table = open_table(path)
    assert [table.row(i)["s"] for i in range(600)] == names


def test_a_field_of_a_missing_struct_is_none(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"e": {"index": 4}}, {"e": None}]), path)
    assert open_table(path).values("e", "index") == [4, None]


def test_no_file_is_left_in_the_temporary_folder(tmp_path, monkeypatch):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": [1, 2]}), path)
    table = open_table(path)
    assert list(folder.iterdir()) == []
    path.unlink()
    assert table.row(1) == {"n": 2}


def test_empty_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": pa.array([], pa.int64())}), path)
    table = open_table(path)
    assert len(table) == 0
    assert table.columns == ("n",)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"x": 1, "e": {"index": 5}}\r\n\n{"y": [NaN]}\n'),
        ("a.json", '{"x": 1, "e": {"index": 5}}\n{"y": [NaN]}'),
        ("b.json", ' [{"x": 1, "e": {"index": 5}}, {"y": [NaN]}]'),
        ("bom.jsonl", '\ufeff{"x": 1, "e": {"index": 5}}\n{"y": [NaN]}\n'),
    ],
)
def test_json_forms(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    table = open_table(path)
    assert len(table) == 2
    assert table.columns == ("x", "e", "y")
    assert table.row(0) == {"x": 1, "e": {"index": 5}}
    assert table.values("e", "index") == [5, None]
    assert table.values("x") == [1, None]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", '{"x": 1}\n{"x": \n', "line 2: broken json"),
        ("a.jsonl", '{"x": 1}\n[1]\n', "line 2: is list"),
        ("a.json", '[{"x": 1}, 3]', "row 1: is int"),
        ("a.json", "[{", "broken json"),
        ("a.parquet", "no parquet at all", "cannot be read as parquet"),
        ("a.csv", "x,y", "not a data file; name files that end in .parquet, .jsonl, .json"),
    ],
)
def test_broken_files_are_named(tmp_path, name, text, says):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        open_table(path)
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)


def test_text_that_is_not_utf8_missing_file_and_folder(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": "\xff"}')
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        open_table(path)
    with pytest.raises(DataError, match=r"absent\.parquet: no such file .*data\.train_files"):
        open_table(tmp_path / "absent.parquet")
    with pytest.raises(DataError, match="not a data file"):
        open_table(tmp_path)


def test_write_parquet_is_whole_or_not_there(tmp_path):
    path = tmp_path / "new" / "a.parquet"
    write_parquet([{"x": 1}], path)
    with pytest.raises(pa.ArrowException):
        write_parquet([{"x": 1}, {"x": "text"}], path)
    assert [item.name for item in path.parent.iterdir()] == ["a.parquet"]
    assert open_table(path).row(0) == {"x": 1}
    write_parquet([{"x": 1}, {"x": 2, "late": 3}], path)
    assert open_table(path).row(1) == {"x": 2, "late": 3}
    write_parquet([{"x": "2"}], path, pa.schema([("x", pa.string()), ("y", pa.int64())]))
    assert json.dumps(open_table(path).row(0)) == '{"x": "2", "y": null}'
