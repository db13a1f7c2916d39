"""Readable rollouts: one object a row, images once beside, failures with their text."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vrl.controller.rollout_files import RolloutFiles
from vrl.protocol.dataproto import DataProto, Meta
from vrl.protocol.rows import batch_of
from vrl.protocol.trajectory import StopReason, Trajectory, content_key

Make = Callable[..., Trajectory]
PNG, JPEG = b"\x89PNG\r\n\x1a\n one", b"\xff\xd8\xff\xe0 two"
RENDERED = "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|>What?<|im_end|>\n"


@dataclass(frozen=True)
class Step:
    rows: DataProto
    failed: DataProto


def step_of(rows: list[Trajectory], failed: list[Trajectory]) -> Step:
    together = batch_of([*rows, *failed], None, Meta())
    return Step(together[: len(rows)], together[len(rows) :])


def objects_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_row_is_readable(trajectory: Make, tmp_path: Path):
    row = trajectory(
        "u7",
        turns=(2, 3),
        score=0.5,
        images=(PNG, JPEG),
        sample_index=1,
        prompt_text=RENDERED,
        response_text="schön <|image_pad|>",
        ground_truth={"answer": np.array([1, 2])},
        score_extra={"acc": 1.0},
        turn_rewards=(0.25, 0.0),
        turn_info=({"calls": 1}, {}),
        stop_reason=StopReason.MAX_TURNS,
    )
    path = RolloutFiles(tmp_path / "rollouts").write(step_of([row], []), 12)
    assert path == tmp_path / "rollouts" / "step_12.jsonl"
    assert "schön" in path.read_text(encoding="utf-8")
    images = [f"images/{content_key(PNG)}.png", f"images/{content_key(JPEG)}.jpg"]
    assert objects_in(path) == [
        {
            "step": 12,
            "uid": "u7",
            "row_id": "row-u7",
            "sample_index": 1,
            "data_source": "tiny/visual",
            "prompt_text": "<|im_start|>user\n<image>What?<|im_end|>\n",
            "response_text": "schön <image>",
            "ground_truth": {"answer": [1, 2]},
            "score": 0.75,
            "score_extra": {"acc": 1.0},
            "turn_rewards": [0.25, 0.0],
            "turn_info": [{"calls": 1}, {}],
            "stop_reason": "max_turns",
            "prompt_length": 3,
            "response_length": 6,
            "sampled_tokens": 5,
            "images": images,
        }
    ]
    assert [(path.parent / name).read_bytes() for name in images] == [PNG, JPEG]


def test_what_json_cannot_hold_is_replaced(trajectory: Make, tmp_path: Path):
    row = trajectory(
        response_text="half a pair \ud800 \u00f6",
        score_extra={"pred": "\udfff", "NaN": float("inf")},
        turn_rewards=(0.0,),
        turn_info=({"x": float("nan"), "y": np.array([1.0, np.nan])},),
    )
    path = RolloutFiles(tmp_path).write(step_of([row], []), 1)
    (written,) = [
        json.loads(line, parse_constant=pytest.fail) for line in path.read_text(encoding="utf-8").splitlines()
    ]
    assert written["response_text"] == "half a pair ? \u00f6"
    assert written["score_extra"] == {"pred": "?", "NaN": None}
    assert written["turn_info"] == [{"x": None, "y": [1.0, None]}]


def test_two_images_side_by_side_stay_two(trajectory: Make, tmp_path: Path):
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    path = RolloutFiles(tmp_path).write(step_of([trajectory(prompt_text=f"{mark}{mark}?")], []), 1)
    assert objects_in(path)[0]["prompt_text"] == "<image><image>?"


def test_a_shared_image_is_written_once_and_a_half_written_one_again(trajectory: Make, tmp_path: Path):
    files = RolloutFiles(tmp_path)
    step = step_of([trajectory(images=(PNG,), sample_index=i) for i in range(3)], [])
    files.write(step, 1)
    (image,) = (tmp_path / "images").iterdir()
    before = image.stat().st_mtime_ns
    files.write(step, 2)
    assert image.stat().st_mtime_ns == before
    image.write_bytes(PNG[:4])
    files.write(step, 3)
    assert image.read_bytes() == PNG


def test_failures_keep_their_text_and_have_no_score(trajectory: Make, tmp_path: Path):
    path = RolloutFiles(tmp_path).write(step_of([trajectory(score=1.0)], [trajectory("u1", failure="reward hung")]), 1)
    good, bad = objects_in(path)
    assert (good["score"], good["stop_reason"]) == (1.0, "answer")
    assert (bad["score"], bad["stop_reason"], bad["score_extra"]) == (None, "failed", {"failure": "reward hung"})


@pytest.mark.parametrize(("max_rows", "good", "bad"), [(None, 6, 4), (4, 2, 2), (9, 5, 4), (100, 6, 4), (0, 0, 0)])
def test_a_bound_on_rows(max_rows: int | None, good: int, bad: int, trajectory: Make, tmp_path: Path):
    step = step_of([trajectory(f"u{i}") for i in range(6)], [trajectory(f"f{i}", failure="x") for i in range(4)])
    rows = objects_in(RolloutFiles(tmp_path, max_rows).write(step, 1))
    assert [row["stop_reason"] for row in rows] == ["answer"] * good + ["failed"] * bad


def test_a_step_without_rows_gives_an_empty_file(trajectory: Make, tmp_path: Path):
    step = step_of([trajectory()], [])
    assert RolloutFiles(tmp_path).write(Step(step.rows[:0], step.failed), 3).read_text() == ""


def test_writing_beside_the_next_step_loses_nothing(trajectory: Make, tmp_path: Path):
    files = RolloutFiles(tmp_path / "rollouts")
    for number in range(1, 6):
        files.write_beside(step_of([trajectory()], []), number)
    files.finish()
    assert sorted(path.name for path in (tmp_path / "rollouts").glob("*.jsonl")) == [
        f"step_{n}.jsonl" for n in range(1, 6)
    ]


def test_a_failed_write_beside_is_raised_by_the_next_call(trajectory: Make, tmp_path: Path):
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    files = RolloutFiles(tmp_path / "rollouts")
    files.write_beside(step_of([trajectory()], []), 1)
    with pytest.raises(OSError, match="rollouts"):
        files.finish()
    files.finish()
