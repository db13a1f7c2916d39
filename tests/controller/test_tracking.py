"""Every logger gets every step, also after a failure; none can stop or hang a run."""

import json
import math
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vrl.controller.run_folder import RunFolder
from vrl.controller.tracking import Sample, Tracker, WandbLog
from vrl.protocol.config.schema import Config

STEP = {"critic/score/mean": 0.5, "timing_s/step": 2.0, "timing_s/gen": 1.0, "actor/grad_norm": math.inf}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.open(tmp_path / "run", "") as opened:
        yield opened


@pytest.fixture
def no_wandb_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))


def config_with(*loggers: str, samples: int = 0) -> Config:
    config = Config()
    return replace(config, trainer=replace(config.trainer, logger=loggers, log_val_generations=samples))


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["training/global_step"] for line in path.read_text().splitlines()]


def scalars(folder: RunFolder, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_console_and_file_get_a_line_a_step(folder: RunFolder, capsys: pytest.CaptureFixture[str]):
    with Tracker(folder, config_with("console"), total_steps=2) as tracker:
        tracker.log({"val-core/sums/reward/mean@1": 0.25}, 0)
        tracker.log(STEP, 1)
        assert steps_in(folder.metrics) == [0, 1]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "held out after step 0, sums | reward mean@1 0.250"
    assert lines[1].startswith("step 1/2 | score 0.500 | grad inf | 2.0 s (gen 50%)")
    assert len(lines) == 2
    assert lines[1] in (folder.path / "log.txt").read_text()


@pytest.mark.usefixtures("no_wandb_account")
def test_what_comes_later_joins_the_step(folder: RunFolder, capsys: pytest.CaptureFixture[str]):
    parts = [STEP, {"val-core/sums/reward/mean@1": 0.25}, {"timing_s/save_checkpoint": 3.5}]
    with Tracker(folder, config_with("console", "tensorboard", "wandb"), total_steps=2) as tracker:
        for part in parts:
            tracker.log(part, 1)
    (line,) = folder.metrics.read_text().splitlines()
    assert json.loads(line) == {"training/global_step": 1} | parts[0] | parts[1] | parts[2] | {"actor/grad_norm": None}
    step, evaluation = capsys.readouterr().out.splitlines()
    assert step.startswith("step 1/2 |")
    assert evaluation.startswith("held out after step 1, sums |")
    assert scalars(folder, "timing_s/save_checkpoint") == [(1, 3.5)]
    assert all(name.encode() in wandb_file(folder.path) for part in parts[1:] for name in part)


def test_without_console_the_lines_are_in_the_log_only(folder: RunFolder, capsys: pytest.CaptureFixture[str]):
    with Tracker(folder, config_with(), total_steps=2) as tracker:
        tracker.log(STEP, 1)
    assert capsys.readouterr().out == ""
    assert "step 1/2" in (folder.path / "log.txt").read_text()
    assert not folder.tensorboard.exists()


def test_after_a_failure_everything_is_on_disk(folder: RunFolder):
    def run_that_fails() -> None:
        with Tracker(folder, config_with("tensorboard"), total_steps=2) as tracker:
            tracker.log(STEP, 1)
            raise RuntimeError("a worker died")

    with pytest.raises(RuntimeError, match="a worker died"):
        run_that_fails()
    assert steps_in(folder.metrics) == [1]
    assert scalars(folder, "critic/score/mean") == [(1, 0.5)]


def test_a_resumed_run_goes_on_in_all_files(folder: RunFolder):
    for resume_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        with Tracker(folder, config_with("tensorboard"), total_steps=4, resume_step=resume_step) as tracker:
            for step in steps:
                tracker.log({"x": step + resume_step / 4}, step)
    assert steps_in(folder.metrics) == [1, 2, 3, 4]
    assert scalars(folder, "x") == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5)]


def test_equal_runs_give_equal_files(tmp_path: Path):
    texts = []
    for name in ("a", "b"):
        with (
            RunFolder.open(tmp_path / name, "") as folder,
            Tracker(folder, config_with(), total_steps=2) as tracker,
        ):
            for step in (1, 2):
                tracker.log({"loss": 1 / 3, "score": step / 7}, step)
            texts.append(folder.metrics.read_bytes())
    assert texts[0] == texts[1]


def test_samples_are_the_same_prompts_at_every_evaluation(folder: RunFolder):
    with Tracker(folder, config_with("tensorboard", samples=2), total_steps=2) as tracker:
        for step in (1, 2):
            samples = [Sample(prompt=f"{i} + 1?", response=f"step {step}", score=i / 10) for i in range(9)]
            tracker.log_samples(samples if step == 1 else samples[::-1], step)
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    texts = {
        tag: [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
    assert len(texts) == 2
    for first, second in texts.values():
        assert first.replace("step 1", "step 2") == second
        assert "+ 1?" in first


def wandb_file(folder: Path) -> bytes:
    """The one offline run in a folder; keys and values stand in it as text."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    return path.read_bytes()


@pytest.mark.usefixtures("no_wandb_account")
def test_wandb_without_a_key_is_offline_and_complete(folder: RunFolder, caplog: pytest.LogCaptureFixture):
    with Tracker(folder, config_with("wandb"), total_steps=2) as tracker:
        tracker.log(STEP, 1)
        tracker.log({"critic/score/mean": 0.75}, 2)
    written = wandb_file(folder.path)
    assert written.count(b"critic/score/mean") >= 2
    assert written.index(b"0.5") < written.index(b"0.75")
    assert "wandb sync" in caplog.text


@pytest.mark.usefixtures("no_wandb_account")
def test_wandb_with_a_key_but_no_network_is_offline_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        begin = time.monotonic()
        log = WandbLog(tmp_path, "project", "name", {"a": {"b": 1}}, 0)
        log.log({"x": 1.0}, 1)
        log.close()
        assert time.monotonic() - begin < 60.0
    assert b"project" in wandb_file(tmp_path)


def test_wandb_mode_has_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    log = WandbLog(tmp_path, "project", "name", {}, 0)
    log.log({"x": 1.0}, 1)
    log.close()
    assert not list(tmp_path.glob("wandb/*run-*"))


def test_a_resumed_run_keeps_its_wandb_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    names = []
    for resume_step in (0, 5, 0):
        WandbLog(tmp_path, "project", "name", {}, resume_step).close()
        names.append((tmp_path / "wandb_run_id.txt").read_text())
    assert names[0] == names[1] != names[2]


def test_a_wandb_that_breaks_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The first failure is a warning, and the run goes on without it."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = WandbLog(tmp_path, "project", "name", {}, 0)
    assert log._run is not None
    log._run.finish()  # a finished run refuses everything
    log.log({"x": 1.0}, 1)
    log.log({"x": 1.0}, 2)
    log.close()
    assert caplog.text.count("wandb is left out from step") == 1
