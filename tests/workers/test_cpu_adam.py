"""DeepSpeed's CPU Adam in the learner, over two ranks' shards: AdamW's steps, and a checkpoint that goes on exactly."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.workers.rig import free_port

HERE = Path(__file__).parent
BOUND = 1e-6


@pytest.fixture(scope="module")
def measured(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("cpu_adam") / "found.json"
    argument = json.dumps({"folder": str(tiny_folder("qwen2")), "out": str(out)})
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(HERE.parents[1])}
    script = [sys.executable, str(HERE / "cpu_adam_process.py"), argument]
    processes = [subprocess.Popen(script, env=shared | {"RANK": str(rank)}) for rank in range(2)]
    try:
        # The first time on a machine the kernel is compiled, which takes a minute or two: hence the tier `long`.
        assert [process.wait(timeout=600) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return json.loads(out.read_text())


@pytest.mark.long
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_steps_are_those_of_adamw(measured: dict[str, dict[str, Any]], role: str) -> None:
    found = measured[role]
    assert max(found["apart"]) < BOUND
    assert found["moved"] > 1000 * BOUND


@pytest.mark.long
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_checkpoint_goes_on_exactly(measured: dict[str, dict[str, Any]], role: str) -> None:
    found = measured[role]
    assert found["apart_when_read"] == 0.0
    assert found["apart_a_step_later"] == 0.0
