"""Checkpoints are complete or absent, whatever moment the run was killed at. Torch-free."""

import logging
import os
import shutil
from pathlib import Path

import pytest

from vrl.controller import checkpoint_folders
from vrl.controller.checkpoint_folders import CheckpointFolders


@pytest.fixture
def folders(tmp_path: Path) -> CheckpointFolders:
    return CheckpointFolders(tmp_path / "checkpoints", tmp_path / "latest.txt")


def save(folders: CheckpointFolders, step: int, max_keep: int | None = None, text: str = "weights") -> None:
    with folders.writing(step, max_keep) as part:
        (part / "actor").mkdir()
        (part / "actor" / "model").write_text(text)


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


def test_a_saved_checkpoint_is_found(folders: CheckpointFolders, tmp_path: Path):
    assert folders.latest() is None
    save(folders, 5)
    save(folders, 10)
    assert folders.latest() == tmp_path / "checkpoints" / "global_step_10"
    assert (tmp_path / "latest.txt").read_text() == "10\n"
    assert names(tmp_path) == ["global_step_10", "global_step_5"]


def test_nothing_is_there_while_it_is_being_written(folders: CheckpointFolders, tmp_path: Path):
    with folders.writing(5, None) as part:
        (part / "model").write_text("half")
        assert folders.latest() is None
        assert not (tmp_path / "latest.txt").exists()


def test_a_save_that_fails_leaves_nothing_and_keeps_the_last(folders: CheckpointFolders, tmp_path: Path):
    def save_on_a_full_disk() -> None:
        with folders.writing(10, 1) as part:
            (part / "model").write_text("half")
            raise OSError("disk full")

    save(folders, 5, max_keep=1)
    with pytest.raises(OSError, match="disk full"):
        save_on_a_full_disk()
    assert names(tmp_path) == ["global_step_5"]
    assert (tmp_path / "latest.txt").read_text() == "5\n"


def test_what_a_kill_left_half_written_is_removed_with_a_note(
    folders: CheckpointFolders, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save(folders, 5)
    part = tmp_path / "checkpoints" / "global_step_10.tmp"
    part.mkdir()
    (part / "model").write_text("half")
    with caplog.at_level(logging.WARNING):
        folders.recover()
    assert names(tmp_path) == ["global_step_5"]
    assert "global_step_10.tmp" in caplog.text


@pytest.mark.parametrize("operation", ["rename", "replace", "rmtree", "fsync"])
@pytest.mark.parametrize("occurrence", range(8))
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(
    operation: str, occurrence: int, folders: CheckpointFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Saving step 10 again over an older one, with pruning, dies at the n-th rename, replace, removal or fsync."""
    save(folders, 5)
    save(folders, 10, text="old")
    owner = {"rename": Path, "replace": Path, "rmtree": shutil, "fsync": os}[operation]
    original = vars(owner)[operation]
    left = [occurrence]

    class Killed(BaseException):
        pass

    def dying(*arguments: object, **options: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return original(*arguments, **options)

    monkeypatch.setattr(owner, operation, dying)
    died = False
    try:
        save(folders, 10, max_keep=1, text="new")
    except Killed:
        died = True
    monkeypatch.undo()
    folders.recover()
    latest = folders.latest()
    assert latest == tmp_path / "checkpoints" / "global_step_10"
    assert (latest / "actor" / "model").read_text() in (("old", "new") if died else ("new",))
    assert not any(name.endswith(".tmp") for name in names(tmp_path))
    assert died or names(tmp_path) == ["global_step_10"]


def test_one_that_only_lacked_its_name_is_kept(folders: CheckpointFolders, tmp_path: Path):
    save(folders, 5)
    save(folders, 10)
    (tmp_path / "checkpoints" / "global_step_10").rename(tmp_path / "checkpoints" / "global_step_10.tmp")
    folders.recover()
    assert folders.latest() == tmp_path / "checkpoints" / "global_step_10"


@pytest.mark.parametrize("damage", ["cut", "file gone", "no manifest"])
def test_a_damaged_one_is_passed_over_and_named(
    damage: str, folders: CheckpointFolders, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save(folders, 5)
    save(folders, 10)
    newest = tmp_path / "checkpoints" / "global_step_10"
    if damage == "cut":
        (newest / "actor" / "model").write_text("wei")
    else:
        (newest / ("actor/model" if damage == "file gone" else checkpoint_folders.MANIFEST)).unlink()
    with caplog.at_level(logging.WARNING):
        assert folders.latest() == tmp_path / "checkpoints" / "global_step_5"
    assert str(newest) in caplog.text


def test_the_pointer_file_is_not_trusted(folders: CheckpointFolders, tmp_path: Path):
    save(folders, 5)
    (tmp_path / "latest.txt").write_text("99\n")
    assert folders.latest() == tmp_path / "checkpoints" / "global_step_5"


def test_the_newest_are_kept_also_those_of_an_earlier_process(folders: CheckpointFolders, tmp_path: Path):
    for step in (5, 10, 15):
        save(folders, step)
    save(CheckpointFolders(tmp_path / "checkpoints", tmp_path / "latest.txt"), 20, max_keep=2)
    assert names(tmp_path) == ["global_step_15", "global_step_20"]


def test_pruning_never_counts_a_damaged_one_nor_removes_the_last(folders: CheckpointFolders, tmp_path: Path):
    save(folders, 5)
    save(folders, 10)
    (tmp_path / "checkpoints" / "global_step_10" / checkpoint_folders.MANIFEST).unlink()
    save(folders, 15, max_keep=2)
    assert names(tmp_path) == ["global_step_10", "global_step_15", "global_step_5"]
    save(folders, 20, max_keep=0)
    assert folders.latest() == tmp_path / "checkpoints" / "global_step_20"


def test_a_run_taken_back_to_an_earlier_step_goes_on_from_its_own(folders: CheckpointFolders, tmp_path: Path):
    for step in (10, 20, 30):
        save(folders, step)
    save(folders, 15, max_keep=2)
    assert folders.latest() == tmp_path / "checkpoints" / "global_step_15"
    assert names(tmp_path) == ["global_step_15", "global_step_30"]
