"""The tiny agent task: answers follow from calls, the overview of an image shows nothing, splits stay apart."""

import io
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vrl.data.tiny_agent_tasks import (
    AGENT_TASKS,
    QUARTER_PIXELS,
    STRIPES,
    agent_texts,
    rows,
    write_tiny_agent_data,
)
from vrl.data.tiny_rows import SPLITS, WARM_START_ERRORS


@pytest.mark.parametrize("task", ["code", "zoom"])
def test_rows_are_equal_for_equal_seeds(task) -> None:
    first = list(rows(task, "train", 10, 3))
    assert first == list(rows(task, "train", 10, 3))
    assert first != list(rows(task, "train", 10, 4))


def test_the_teachers_cell_prints_the_answer_when_it_does_not_err() -> None:
    right = 0
    for row in rows("code", "warm_start", 300, 0):
        *calls, answer = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        found = re.fullmatch(r"```python\nprint\((\d+ [+*-] \d+)\)\n```", calls[0]) if calls else None
        works = found is not None and str(eval(found[1])) == row["reward_model"]["ground_truth"] == answer
        right += works
    assert 1 - WARM_START_ERRORS - 0.1 < right / 300 < 1 - WARM_START_ERRORS + 0.1


def test_the_teachers_box_shows_the_color_asked_for() -> None:
    right = 0
    for row in rows("zoom", "warm_start", 200, 0):
        *calls, answer = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        try:
            call = json.loads(calls[0].removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")) if calls else {}
        except json.JSONDecodeError:
            continue
        if call and answer == row["reward_model"]["ground_truth"]:
            crop = picture(row).crop(call["arguments"]["bbox_2d"])
            assert crop.size == (QUARTER_PIXELS, QUARTER_PIXELS)
            seen = np.asarray(crop)[0, 0].astype(int)
            right += min(STRIPES, key=lambda name: np.abs(seen - STRIPES[name]).sum()) == answer
    assert right / 200 > 1 - WARM_START_ERRORS - 0.1


def test_at_the_models_resolution_all_of_an_image_is_one_grey() -> None:
    for row in rows("zoom", "val", 20, 0):
        overview = picture(row).resize((QUARTER_PIXELS, QUARTER_PIXELS), Image.Resampling.BICUBIC)
        quarters = np.asarray(overview, dtype=float)[4:-4, 4:52]  # away from the borders between quarters
        assert np.abs(quarters - quarters.mean(-1, keepdims=True)).max() <= 1.0  # no color is left


def test_splits_share_no_image_and_no_question() -> None:
    seen: list[set[bytes]] = []
    for split in SPLITS:
        images = {row["images"][0]["bytes"] for row in rows("zoom", split, 60, 0)}
        questions = {row["prompt"][0]["content"].encode() for row in rows("code", split, 600, 0)}
        seen.append(images | questions)
    assert not (seen[0] & seen[1])
    assert not (seen[0] & seen[2])
    assert not (seen[1] & seen[2])


def test_files_mix_all_tasks(tmp_path: Path) -> None:
    paths = write_tiny_agent_data(tmp_path, 0, {"warm_start": 40, "train": 20, "val": 10})
    table = pq.read_table(paths["train"]).to_pylist()
    assert Counter(row["data_source"] for row in table) == {f"tiny/{task}": 20 for task in AGENT_TASKS}
    assert {row["env_name"] for row in table} == {None, "python", "zoom"}
    assert "messages" in pq.read_table(paths["warm_start"]).column_names


def test_texts_for_the_tokenizer() -> None:
    assert any("```python" in text for text in agent_texts())
    assert any("image_zoom_in_tool" in text for text in agent_texts())


def picture(row) -> Image.Image:
    return Image.open(io.BytesIO(row["images"][0]["bytes"]))
