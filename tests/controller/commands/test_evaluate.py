"""Which checkpoint is evaluated; whole evaluations are in test_run.py. Torch-free."""

from pathlib import Path

import pytest

from vrl.controller.commands.evaluate import chosen
from vrl.controller.run_folder import RunFolder
from vrl.protocol.config.trainer import TrainerConfig
from vrl.protocol.errors import ConfigError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunFolder.open(tmp_path / "run", "a: 1\n") as folder:
        for step in (2, 4):
            with folder.new_checkpoint(step, None) as part:
                (part / "driver.json").write_text("{}")
    return tmp_path / "run"


def test_the_newest_checkpoint_unless_another_or_none_is_asked_for(run: Path) -> None:
    newest = chosen(run, TrainerConfig())
    assert newest is not None
    assert (newest.step, newest.path) == (4, run / "checkpoints" / "global_step_4")
    named = chosen(run, TrainerConfig(resume_mode="resume_path", resume_from_path=f"{run}/checkpoints/global_step_2"))
    assert named is not None
    assert named.step == 2
    assert chosen(run, TrainerConfig(resume_mode="disable")) is None
    assert chosen(run / "elsewhere", TrainerConfig()) is None
    assert not (run / "elsewhere").exists()


def test_a_folder_that_is_no_whole_checkpoint_is_refused(run: Path) -> None:
    (run / "checkpoints" / "global_step_2" / "driver.json").unlink()
    for name in ("global_step_2", "global_step_3"):
        path = run / "checkpoints" / name
        with pytest.raises(ConfigError, match=f"resume_from_path={path} is no complete checkpoint"):
            chosen(run, TrainerConfig(resume_mode="resume_path", resume_from_path=str(path)))
