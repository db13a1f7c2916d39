"""The tiny tasks: format, balance, equal rows for equal seeds, splits without a shared image or question."""

import hashlib
import io
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vrl.data.tiny_tasks import COLORS, SPLITS, TASKS, rows, tokenizer_texts, write_tiny_data


def _pixels(row: dict) -> list[np.ndarray]:
    return [np.asarray(Image.open(io.BytesIO(image["bytes"]))) for image in row["images"]]


def _colors_seen(pixels: np.ndarray) -> list[str]:
    names = {value: name for name, value in COLORS.items()}
    return [names[value] for value in {tuple(map(int, cell)) for cell in pixels.reshape(-1, 3)} if value in names]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("split", SPLITS)
def test_rows_are_equal_for_equal_seeds_and_differ_for_others(task, split):
    first = list(rows(task, split, 20, 3))
    assert first == list(rows(task, split, 20, 3))
    assert first != list(rows(task, split, 20, 4))


def test_visual_answers_are_the_colour_of_the_asked_image():
    kinds = Counter()
    for row in rows("visual", "train", 200, 0):
        content = row["prompt"][0]["content"]
        images = _pixels(row)
        assert content.count("<image>") == len(images)
        asked = 1 if "second" in content else 0
        assert _colors_seen(images[asked]) == [row["reward_model"]["ground_truth"]]
        assert all(side % 28 == 0 for image in images for side in image.shape[:2])
        kinds[row["extra_info"]["kind"]] += 1
    assert min(kinds["one_image"], kinds["two_images"]) >= 50


def test_answers_cannot_be_guessed_from_the_text():
    best = Counter()
    total = Counter()
    answers: dict[str, Counter] = {}
    for row in rows("visual", "val", 2000, 0):
        answers.setdefault(row["prompt"][0]["content"], Counter())[row["reward_model"]["ground_truth"]] += 1
    for question, counts in answers.items():
        best[question] = max(counts.values())
        total[question] = sum(counts.values())
    assert sum(best.values()) / sum(total.values()) < 1 / len(COLORS) + 0.07


def test_splits_share_no_image_and_no_question_whatever_the_seed():
    images: dict[str, set[str]] = {}
    questions: dict[str, set[str]] = {}
    for split in SPLITS:
        for seed in (0, 1):
            for row in rows("visual", split, 1000, seed):
                images.setdefault(split, set()).update(hashlib.sha256(p.tobytes() + bytes(p.shape)).hexdigest() for p in _pixels(row))
            for row in rows("arithmetic", split, 1000, seed):
                questions.setdefault(split, set()).add(row["prompt"][0]["content"])
    for contents in (images, questions):
        assert all(len(found) > 500 for found in contents.values())
        assert len(set.union(*contents.values())) == sum(len(found) for found in contents.values())


def test_files_keep_the_rows_and_their_columns(tmp_path: Path):
    paths = write_tiny_data(tmp_path, 0, {"warm_start": 6, "train": 8, "val": 4})
    for split, path in paths.items():
        table = pq.read_table(path).to_pylist()
        assert [row["data_source"] for row in table[:4]] == ["tiny/visual", "tiny/arithmetic"] * 2
        assert [row for row in table if row["data_source"] == "tiny/visual"] == list(rows("visual", split, len(table) // 2, 0))
        assert all(row["extra_info"]["split"] == split for row in table)
        assert all(len(row["images"]) == row["prompt"][0]["content"].count("<image>") for row in table)
    assert set(pq.read_schema(paths["warm_start"]).names) - set(pq.read_schema(paths["train"]).names) == {"messages"}


def test_files_are_equal_for_equal_seeds(tmp_path: Path):
    counts = {"val": 20}
    first = write_tiny_data(tmp_path / "a", 5, counts)["val"].read_bytes()
    assert first == write_tiny_data(tmp_path / "b", 5, counts)["val"].read_bytes()
    assert first != write_tiny_data(tmp_path / "c", 6, counts)["val"].read_bytes()


def test_warm_start_messages_end_in_the_right_answer():
    for task in TASKS:
        for row in rows(task, "warm_start", 10, 0):
            assert row["messages"][:-1] == row["prompt"]
            assert row["messages"][-1] == {"role": "assistant", "content": row["reward_model"]["ground_truth"]}


def test_tokenizer_texts_hold_the_words_of_both_tasks_and_a_tool_call():
    text = "".join(tokenizer_texts())
    for word in (*COLORS, "second", "<tool_response>", '"arguments"'):
        assert word in text


@pytest.mark.parametrize(("task", "split", "count", "named"), [("sums", "train", 1, "task"), ("visual", "test", 1, "split"), ("visual", "train", -1, "count")])
def test_wrong_arguments_are_named(task, split, count, named):
    with pytest.raises(ValueError, match=named):
        list(rows(task, split, count, 0))


def test_import_loads_no_torch():
    code = "import sys, vrl.data.tiny_tasks; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
