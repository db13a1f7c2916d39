"""Checkpoints of a run: complete or absent.

Each role writes its part, the driver the rest; then the folder gets its name. Called by the trainer.
"""

import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, final

from vrl.controller.roles import Actor, Values
from vrl.controller.run_folder import RunFolder
from vrl.protocol.config.trainer import TrainerConfig
from vrl.protocol.errors import ConfigError, DataError

_DRIVER_STATE = "driver.json"


class Saved(Protocol):
    """What a trainer shows of itself to be saved, and how it takes it back."""

    global_step: int

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the roles' own state, as JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        ...

    def learners(self) -> tuple[Actor, Values]:
        """Return the roles whose weights a checkpoint keeps."""
        ...


@final
class Checkpoints:
    """Writes and finds checkpoints of one run folder."""

    def __init__(self, folder: RunFolder, config: TrainerConfig, exported: Collection[str] = ()) -> None:
        """`exported` are the roles (actor, critic) that also write a model folder that others can load."""
        self._folder = folder
        self._config = config
        self._exported = exported

    def save(self, trainer: Saved) -> dict[str, float]:
        """Save everything a resumed run needs; return the seconds it took."""
        begin = time.perf_counter()
        step = trainer.global_step
        actor, critic = trainer.learners()
        with self._folder.new_checkpoint(step, self._config.max_actor_ckpt_to_keep) as part:
            for name, role in (("actor", actor), ("critic", critic)):
                role.save(part / name)
                if name in self._exported:
                    role.export(part / name / "huggingface")
            (part / _DRIVER_STATE).write_text(json.dumps(trainer.state(), indent=1))
        return {"timing_s/save_checkpoint": time.perf_counter() - begin}

    def resume(self, trainer: Saved) -> int:
        """Load the checkpoint the settings ask for; return its step, 0 when there is none.

        Raises DataError where it does not fit, or lacks something.
        """
        folder = self._chosen()
        if folder is None:
            return 0
        state = json.loads((folder / _DRIVER_STATE).read_text())
        actor, critic = trainer.learners()
        actor.load(folder / "actor")
        critic.load(folder / "critic")
        try:
            trainer.restore(state)
            return int(state["global_step"])
        except KeyError as error:
            raise DataError(
                f"checkpoint {folder} is of another version: {_DRIVER_STATE} has no entry {error}"
            ) from error

    def load_policy(self, trainer: Saved) -> int:
        """Load the actor alone, which an evaluation needs, from the checkpoint the settings ask for; return its step.

        Rows and critic may be others than those of the run.
        """
        folder = self._chosen()
        if folder is not None:
            trainer.learners()[0].load(folder / "actor")
        return self.start_step()

    def start_step(self) -> int:
        """Return the step a run would go on from, without loading anything."""
        folder = self._chosen()
        return 0 if folder is None else int(json.loads((folder / _DRIVER_STATE).read_text())["global_step"])

    def _chosen(self) -> Path | None:
        if self._config.resume_mode == "disable":
            return None
        if self._config.resume_mode == "auto":
            return self._folder.latest_checkpoint()
        if self._config.resume_from_path is None:
            raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path: a folder global_step_N")
        folder = Path(self._config.resume_from_path)
        if not (folder / _DRIVER_STATE).is_file():
            raise DataError(f"trainer.resume_from_path={folder} is no complete checkpoint: it has no {_DRIVER_STATE}")
        return folder
