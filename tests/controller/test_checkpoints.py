"""What the driver keeps in a checkpoint: taken back as it was, or refused in one line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vrl.controller.checkpoints import Checkpoints
from vrl.controller.roles import NoCritic
from vrl.controller.run_folder import RunFolder
from vrl.protocol.config.trainer import TrainerConfig
from vrl.protocol.errors import DataError


class Counter:
    """Something to be saved, without weights."""

    def __init__(self, step: int) -> None:
        self.global_step = step
        self.rows = step * 10

    def state(self) -> dict[str, Any]:
        return {"global_step": self.global_step, "rows": self.rows}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.rows = state["rows"]

    def learners(self) -> tuple[NoCritic, NoCritic]:
        return NoCritic(), NoCritic()


def test_the_drivers_state_comes_back_and_one_that_lacks_an_entry_is_named(tmp_path: Path):
    with RunFolder.open(tmp_path, "") as folder:
        checkpoints = Checkpoints(folder, TrainerConfig())
        assert (checkpoints.resume(Counter(0)), checkpoints.start_step()) == (0, 0)
        checkpoints.save(Counter(3))
        new = Counter(0)
        assert (checkpoints.resume(new), new.rows, checkpoints.start_step()) == (3, 30, 3)
        with folder.new_checkpoint(4, None) as part:
            (part / "driver.json").write_text(json.dumps({"global_step": 4}))
        with pytest.raises(DataError) as error:
            checkpoints.resume(new)
    assert str(error.value) == (
        f"checkpoint {tmp_path}/checkpoints/global_step_4 is of another version: driver.json has no entry 'rows'"
    )
