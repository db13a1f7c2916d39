"""What is wrong with the settings is said at once, and leaves nothing behind."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """\
import sys
from vrl.controller.cli import main
code = main(sys.argv[1:])
sys.exit(99 if "torch" in sys.modules else code)
"""


@pytest.mark.parametrize("command", ["train", "sft", "eval"])
@pytest.mark.parametrize(
    ("setting", "known"),
    [
        ("algorithm.adv_estimator=grppo", "gpg, grpo, grpo_passk"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=vanila", "tba, vanilla"),
    ],
)
def test_a_mistyped_name_is_refused_before_anything_is_made(
    tmp_path: Path, command: str, setting: str, known: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, command, setting],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert f"vrl {command}: {setting} is not known; there are " in done.stderr
    assert known in done.stderr
    assert list(tmp_path.iterdir()) == []
