"""Datasets of one and several files."""

import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vrl.data.dataset import load_rows
from vrl.data.prompts import ColumnNames
from vrl.protocol.errors import DataError


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl", "train.json"])
def test_rows_of_one_file(save, row, name):
    dataset = load_rows(save(name, [row(index=10 + i, text=f"question {i}") for i in range(3)]))
    assert len(dataset) == 3
    assert dataset.row_ids == ("train:10", "train:11", "train:12")
    assert [dataset[i].messages[0]["content"] for i in range(3)] == ["question 0", "question 1", "question 2"]
    assert dataset[1].uid == dataset[1].row_id == "train:11"


def test_images_in_every_form_beside_the_file(save, row, image, tmp_path):
    data = image()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.png").write_bytes(data)
    forms = [[{"bytes": data, "path": None}], [{"bytes": None, "path": "a.png"}]]
    parquet = save("sub/dicts.parquet", [row(i, "<image>?", images=form) for i, form in enumerate(forms)])
    jsonl = save("sub/paths.jsonl", [row(0, "<image>?", images=["a.png"]), row(1, "<image>?", images="a.png")])
    dataset = load_rows([parquet, jsonl])
    assert [dataset[i].images for i in range(4)] == [(data,)] * 4


def test_files_with_and_without_images_and_missing_cells(save, row, image):
    data = image()
    images = [[{"bytes": data}], [], None]
    texts = ["<image>?", "no image", "none either"]
    mixed = save(
        "mixed.parquet", [row(i, text, images=cell) for i, (text, cell) in enumerate(zip(texts, images, strict=True))]
    )
    plain = save("plain.parquet", [row(0), row(1)])
    nans = save("nans.jsonl", [row(0, images=float("nan")), row(1, images=None), row(2, images=[]), row(3)])
    dataset = load_rows([mixed, plain, nans])
    assert [len(dataset[i].images) for i in range(9)] == [1, 0, 0, 0, 0, 0, 0, 0, 0]


def test_a_parquet_column_of_nan_is_text_rows(tmp_path, row):
    table = pa.Table.from_pylist([row(0), row(1)]).append_column("images", pa.array([float("nan"), None]))
    pq.write_table(table, tmp_path / "a.parquet")
    dataset = load_rows(tmp_path / "a.parquet")
    assert [dataset[i].images for i in range(2)] == [(), ()]


def test_row_ids_fall_back_to_row_numbers(save, row):
    repeated = save("repeated.parquet", [row(0), row(0), row(1)])
    partial = save("partial.jsonl", [row(5), row(extra_info={}), row(extra_info=None)])
    assert load_rows([repeated, partial]).row_ids == (
        *(f"repeated:{i}" for i in range(3)),
        *(f"partial:{i}" for i in range(3)),
    )


def test_row_ids_do_not_depend_on_the_other_rows(save, row):
    path = save("train.parquet", [row(index=f"item-{i}") for i in range(20)])
    whole = load_rows(path)
    part = load_rows(path, max_samples=5, seed=3)
    assert len(set(part.row_ids)) == 5
    assert set(part.row_ids) < set(whole.row_ids) == {f"train:item-{i}" for i in range(20)}


def test_files_of_one_name_get_their_folder_and_no_file_counts_twice(save, row, tmp_path):
    first, second = save("a/train.parquet", [row(0)]), save("b/train.jsonl", [row(0)])
    assert load_rows([first, second]).row_ids == ("a/train:0", "b/train:0")
    deep = [save("x/a/train.jsonl", [row(0)]), save("y/a/train.jsonl", [row(0)])]
    assert load_rows(deep).row_ids == tuple(f"{path}:0" for path in deep)
    with pytest.raises(DataError, match="more than once"):
        load_rows([first, tmp_path / "a" / ".." / "a" / "train.parquet"])


def test_max_samples(save, row):
    path = save("train.parquet", [row(i) for i in range(50)])
    assert load_rows(path, max_samples=3).row_ids == ("train:0", "train:1", "train:2")
    drawn = [load_rows(path, max_samples=10, seed=seed).row_ids for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(load_rows(path, max_samples=-1)) == len(load_rows(path, max_samples=500)) == 50
    for wrong in (0, -2):
        with pytest.raises(DataError, match=f"max_samples={wrong}: give the number of rows to keep, or -1 for all 50"):
            load_rows(path, max_samples=wrong)


def test_equal_prompts_with_other_images_are_other_rows(save, row, image):
    images = [image(color=(i, i, i)) for i in (1, 2)]
    dataset = load_rows(
        save("a.parquet", [row(i, "<image>?", images=[{"bytes": data}]) for i, data in enumerate(images)])
    )
    assert dataset[0].messages == dataset[1].messages
    assert dataset[0].row_id != dataset[1].row_id
    assert [dataset[i].images[0] for i in range(2)] == images


def test_select_keeps_names(save, row):
    dataset = load_rows(save("train.parquet", [row(i) for i in range(5)])).select([4, 1])
    assert dataset.row_ids == ("train:4", "train:1")
    assert dataset[0].extra_info["index"] == 4
    assert dataset.where(0).endswith("train.parquet, row 4")


def test_missing_prompt_column_names_file_columns_and_a_way_out(save):
    path = save("raw.parquet", [{"question": "1 + 1?", "answer": "2"}])
    with pytest.raises(DataError) as caught:
        load_rows(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: no column 'prompt' (it has: question, answer)")
    assert "data.prompt_key" in message
    assert load_rows(path, columns=ColumnNames(prompt="question"))[0].messages[0]["content"] == "1 + 1?"


def test_broken_row_names_file_and_row(save, row):
    path = save("train.jsonl", [row(0), row(1, prompt=None), row(2, "<image>")])
    dataset = load_rows(path)
    with pytest.raises(DataError) as caught:
        dataset[1]
    assert str(caught.value).startswith(f"{path}, row 1: column 'prompt'")
    with pytest.raises(DataError, match="row 2: 1 <image> marks"):
        dataset[2]


def test_unknown_environment_is_found_at_load(save, row):
    rows = [
        row(0),
        row(1, env_name="calculator"),
        row(2, env_name="calcluator"),
        row(3, env_name=""),
        row(4, env_name=None),
    ]
    for name in ("a.jsonl", "a.parquet"):
        path = save(name, rows)
        with pytest.raises(DataError) as caught:
            load_rows(path, env_names={"sokoban", "calculator"})
        message = str(caught.value)
        assert message.startswith(f"{path}, row 2: env_name 'calcluator' is unknown (1 such rows)")
        assert "known: calculator, sokoban" in message
        dataset = load_rows(path, env_names={"calculator", "calcluator"})
        assert [dataset[i].env_name for i in range(5)] == [None, "calculator", "calcluator", None, None]


def test_no_rows_and_no_files(save, tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl: no rows"):
        load_rows(save("a.jsonl", []))
    for files in ([], "", [""]):
        with pytest.raises(DataError, match=r"data\.train_files"):
            load_rows(files)
    with pytest.raises(DataError, match=r"gone\.parquet: no such file"):
        load_rows(tmp_path / "gone.parquet")


def test_the_package_imports_without_torch():
    modules = "convert, dataset, files, filtering, images, loader, prompts"
    code = (
        f"import sys; from vrl.data import {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
