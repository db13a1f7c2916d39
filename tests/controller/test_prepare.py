"""Data of a recipe are written where they are missed, and nowhere else."""

from pathlib import Path

import pytest

from vrl.controller.compose import load
from vrl.controller.prepare import prepare

OWN = b"a person's own rows"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.parquet").write_bytes(OWN)
    return tmp_path


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_mistyped_file_is_not_made_up(folder: Path) -> None:
    prepare(load("tiny_vl_grpo", ["prepare.model=null", "data.train_files=trian.parquet"]).config)
    assert files_of(folder) == {"train.parquet"}


def test_what_is_missed_is_written_beside_what_is_there(folder: Path) -> None:
    files = ["data.train_files=train.parquet", "data.val_files=val.parquet"]
    prepare(load("tiny_vl_grpo", ["prepare.model=null", *files]).config)
    assert files_of(folder) == {"train.parquet", "val.parquet", "data/tiny/warm_start.parquet"}
    assert (folder / "train.parquet").read_bytes() == OWN
