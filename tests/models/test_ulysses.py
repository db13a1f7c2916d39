"""Sequence parallelism over 2 and 4 gloo ranks: exchange, attention, policy and value model. See `ulysses_rank.py`."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 4])  # 4: attention only, with fewer key-value heads than ranks
def test_shared_sequences_give_the_results_and_gradients_of_one_rank(
    text_folder: Path, vision_folder: Path, tmp_path: Path, size: int
) -> None:
    script = Path(__file__).with_name("ulysses_rank.py")
    command = [sys.executable, str(script), str(text_folder), str(vision_folder), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size)], stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        for rank in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(errors)
