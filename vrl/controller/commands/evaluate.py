"""`vrl eval`: evaluate the newest checkpoint of a run on `data.val_files`, once; without a checkpoint, the model.

The run is only read: it may be finished, or still going on. What comes of it lies in `evaluations/` of the run, in a
folder like that of a run; a model that no run has a folder for gets one.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vrl.controller.checkpoint_folders import Checkpoint, read
from vrl.controller.commands import settings
from vrl.controller.compose import yaml_text
from vrl.controller.run_folder import RunFolder, checkpoints_of
from vrl.protocol.config.builder import to_dict
from vrl.protocol.config.rules import Machine, uses_gpu
from vrl.protocol.config.schema import Config
from vrl.protocol.config.trainer import TrainerConfig
from vrl.protocol.errors import ConfigError


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    here = settings.machine()
    found = settings.read("eval", [*arguments, "trainer.val_only=True"], here)
    return 0 if found is None else evaluate(found[0], found[1].config, here)


def evaluate(name: str, config: Config, here: Machine) -> int:
    """Evaluate what the settings name; return the exit code."""
    run = settings.run_path(name, config)
    checkpoint = chosen(run, config.trainer)
    path = None if checkpoint is None else str(checkpoint.path.resolve())
    mode = "disable" if path is None else "resume_path"
    config = replace(config, trainer=replace(config.trainer, resume_mode=mode, resume_from_path=path))
    step = 0 if checkpoint is None else checkpoint.step
    place = run / "evaluations" / f"global_step_{step}-{settings.timestamp()}" if run.exists() else run
    with RunFolder.open(place, yaml_text(to_dict(config))) as folder:
        sys.stdout.write(f"evaluating {path or config.actor_rollout_ref.model.path}\n")
        sys.stdout.flush()
        importlib.import_module("vrl.controller.launch").launch(config, folder, uses_gpu(config, here))
    sys.stdout.write(f"done: {folder.path}\n")
    return 0


def chosen(run: Path, trainer: TrainerConfig) -> Checkpoint | None:
    """Return the checkpoint that the settings ask for: the one they name, else the newest of the run, if any."""
    if trainer.resume_mode == "disable":
        return None
    path = checkpoints_of(run).latest() if trainer.resume_from_path is None else Path(trainer.resume_from_path)
    found = None if path is None else read(path)
    if path is not None and found is None:
        raise ConfigError(f"trainer.resume_from_path={path} is no complete checkpoint: give a folder global_step_N")
    return found
