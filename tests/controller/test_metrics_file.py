"""`metrics.jsonl`: one line a step, on disk at once, equal for equal runs, and right after a resume. Torch-free."""

import json
import math
from pathlib import Path

import pytest

from vrl.controller.metrics_file import MetricsFile


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(path: Path) -> list[int]:
    return [line["training/global_step"] for line in lines_of(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a run that logged the steps 0 to 4."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in range(5):
        file.log({"b": float(step), "a": 1.0}, step)
    file.close()
    return path


def test_a_line_is_on_disk_when_log_returns(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.log({"x": 0.1 + 0.2}, 1)
    assert lines_of(path) == [{"training/global_step": 1, "x": 0.30000000000000004}]
    file.close()


def test_the_order_of_keys_does_not_matter(tmp_path: Path):
    texts = []
    for number, metrics in enumerate(({"b": 1, "a": 2.0, "training/global_step": 9.0}, {"a": 2, "b": 1.0})):
        file = MetricsFile(tmp_path / f"{number}.jsonl", 0)
        file.log(metrics, 3)
        file.close()
        texts.append((tmp_path / f"{number}.jsonl").read_text())
    assert texts[0] == texts[1] == '{"training/global_step": 3, "a": 2.0, "b": 1.0}\n'


def test_numbers_that_are_not_finite_are_null(tmp_path: Path):
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    file.log({"nan": math.nan, "inf": math.inf}, 1)
    file.close()
    assert lines_of(tmp_path / "metrics.jsonl") == [{"training/global_step": 1, "nan": None, "inf": None}]


def test_a_second_log_of_a_step_joins_its_line(path: Path):
    file = MetricsFile(path, 4)
    file.log({"val": 0.5, "b": 40.0}, 4)
    file.log({"b": 5.0}, 5)
    file.log({"val": 0.6}, 5)
    file.close()
    assert steps_of(path) == [0, 1, 2, 3, 4, 5]
    assert lines_of(path)[4:] == [
        {"training/global_step": 4, "a": 1.0, "b": 40.0, "val": 0.5},
        {"training/global_step": 5, "b": 5.0, "val": 0.6},
    ]


def test_a_line_that_gets_shorter_leaves_nothing_behind(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.log({"x": 0.1 + 0.2}, 1)
    file.log({"x": 1.0}, 1)
    assert path.read_text() == '{"training/global_step": 1, "x": 1.0}\n'
    file.close()


def test_a_resumed_run_drops_the_steps_that_run_again(path: Path):
    whole = path.read_text()
    file = MetricsFile(path, 2)
    assert steps_of(path) == [0, 1, 2]
    for step in (3, 4):
        file.log({"a": 1.0, "b": float(step)}, step)
    file.close()
    assert path.read_text() == whole


def test_a_line_cut_by_a_kill_is_dropped(path: Path):
    with path.open("a") as file:
        file.write('{"training/global_step": 5, "a": 1.')
    MetricsFile(path, 5).close()
    assert steps_of(path) == [0, 1, 2, 3, 4]


def test_a_run_from_scratch_sets_the_old_file_aside(path: Path):
    for number in (1, 2):
        file = MetricsFile(path, 0)
        file.log({}, 7)
        file.close()
        assert steps_of(path) == [7]
        assert path.with_name(f"metrics.{number}.jsonl").exists()
    assert steps_of(path.with_name("metrics.1.jsonl")) == [0, 1, 2, 3, 4]
