"""The tiny tasks: format, balance, equal rows for equal seeds, splits without a shared image or question."""

import hashlib
import io
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vrl.data.tiny_rows import SPLITS, WARM_START_ERRORS
from vrl.data.tiny_tasks import (
    COLORS,
    LARGEST_SUM,
    TASKS,
    rows,
    tokenizer_texts,
    write_tiny_data,
)


def _pixels(row: dict) -> list[np.ndarray]:
    return [np.asarray(Image.open(io.BytesIO(image["bytes"]))) for image in row["images"]]


def _colors_seen(images: list[np.ndarray]) -> list[str]:
    names = {value: name for name, value in COLORS.items()}
    cells = [tuple(map(int, cell)) for image in images for cell in image[14::28, 14::28].reshape(-1, 3)]
    return [names[cell] for cell in cells if cell in names]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("split", SPLITS)
def test_rows_are_equal_for_equal_seeds_and_differ_for_others(task, split):
    first = list(rows(task, split, 20, 3))
    assert first == list(rows(task, split, 20, 3))
    assert first != list(rows(task, split, 20, 4))


def test_the_visual_answer_is_the_one_coloured_cell():
    kinds = Counter()
    for row in rows("visual", "train", 200, 0):
        images = _pixels(row)
        assert row["prompt"][0]["content"].count("<image>") == len(images)
        assert _colors_seen(images) == [row["reward_model"]["ground_truth"]]
        assert all(side % 28 == 0 for image in images for side in image.shape[:2])
        kinds[row["extra_info"]["kind"]] += 1
    assert kinds == {"one_image": 100, "two_images": 100}


def test_of_two_images_either_may_hold_the_coloured_cell():
    pairs = [_pixels(row) for row in rows("visual", "train", 200, 0) if len(row["images"]) == 2]
    assert 30 < sum(bool(_colors_seen(pair[:1])) for pair in pairs) < 70


def test_arithmetic_answers_are_the_sum_of_the_numbers():
    for row in rows("arithmetic", "train", 200, 0):
        numbers = [int(digit) for digit in re.findall(r"\d", row["prompt"][0]["content"])]
        assert str(sum(numbers)) == row["reward_model"]["ground_truth"]


def test_answers_cannot_be_guessed_from_the_words():
    answers: dict[str, Counter] = {}
    for task in TASKS:
        for row in rows(task, "val", 2000, 0):
            answers.setdefault(task, Counter())[row["reward_model"]["ground_truth"]] += 1
    assert max(answers["visual"].values()) / 2000 < 1 / len(COLORS) + 0.03
    assert max(answers["arithmetic"].values()) / 2000 < 1 / (LARGEST_SUM - 1) + 0.03


def test_splits_share_no_image_and_no_question_whatever_the_seed():
    seen: dict[str, list[set[str]]] = {"visual": [], "arithmetic": []}
    for split in SPLITS:
        images: set[str] = set()
        questions: set[str] = set()
        for seed in (0, 1):
            for row in rows("visual", split, 1000, seed):
                images.update(hashlib.sha256(repr(p.shape).encode() + p.tobytes()).hexdigest() for p in _pixels(row))
            questions.update(row["prompt"][0]["content"] for row in rows("arithmetic", split, 1000, seed))
        seen["visual"].append(images)
        seen["arithmetic"].append(questions)
    for splits in seen.values():
        assert all(len(found) > 500 for found in splits)
        assert len(set.union(*splits)) == sum(len(found) for found in splits)


def test_files_keep_the_rows_and_their_columns(tmp_path: Path):
    paths = write_tiny_data(tmp_path, 0, {"warm_start": 40, "train": 8, "val": 4})
    for split, path in paths.items():
        table = pq.read_table(path).to_pylist()
        for task in TASKS:
            of_task = [row for row in table if row["data_source"] == f"tiny/{task}"]
            assert list(map(_unplaced, of_task)) == list(map(_unplaced, rows(task, split, len(of_task), 0)))
        assert [row["extra_info"]["index"] for row in table] == list(range(len(table)))
        assert all(len(row["images"]) == row["prompt"][0]["content"].count("<image>") for row in table)
    sources = pq.read_table(paths["train"]).column("data_source").to_pylist()
    assert sources == ["tiny/visual", "tiny/arithmetic"] * 8
    assert set(pq.read_schema(paths["warm_start"]).names) - set(pq.read_schema(paths["train"]).names) == {"messages"}


def _unplaced(row):
    return {**row, "extra_info": {**row["extra_info"], "index": None}}


def test_files_are_equal_for_equal_seeds(tmp_path: Path):
    counts = {"val": 20}
    first = write_tiny_data(tmp_path / "a", 5, counts)["val"].read_bytes()
    assert first == write_tiny_data(tmp_path / "b", 5, counts)["val"].read_bytes()
    assert first != write_tiny_data(tmp_path / "c", 6, counts)["val"].read_bytes()


def test_warm_start_messages_end_in_an_answer_that_is_mostly_right():
    for task in TASKS:
        taught = list(rows(task, "warm_start", 400, 0))
        assert all(row["messages"][:-1] == row["prompt"] for row in taught)
        right = sum(row["messages"][-1]["content"] == row["reward_model"]["ground_truth"] for row in taught) / 400
        assert 1 - WARM_START_ERRORS < right < 1 - WARM_START_ERRORS / 2  # an answer by chance is right at times


def test_tokenizer_texts_hold_the_words_of_both_tasks_and_a_tool_call():
    text = "".join(tokenizer_texts())
    for word in (*COLORS, "images", "How many", "<tool_response>", '"arguments"'):
        assert word in text


@pytest.mark.parametrize(
    ("task", "split", "count", "named"),
    [("sums", "train", 1, "task"), ("visual", "test", 1, "split"), ("visual", "train", -1, "count")],
)
def test_wrong_arguments_are_named(task, split, count, named):
    with pytest.raises(ValueError, match=named):
        list(rows(task, split, count, 0))


def test_import_loads_no_torch():
    code = "import sys, vrl.data.tiny_tasks; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
