"""Two ranks with FSDP2 over gloo, one with text only and one with images."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.dist
def test_gradients_of_unlike_ranks_equal_a_single_process(vision_folder: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("fsdp_rank.py")
    command = [sys.executable, str(script), str(vision_folder), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
