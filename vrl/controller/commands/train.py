"""`vrl train`: from settings to a finished run folder."""

import importlib
import sys
from collections.abc import Sequence

from vrl.controller.commands import evaluate, settings
from vrl.controller.compose import yaml_text
from vrl.controller.run_folder import RunFolder
from vrl.protocol.config.rules import uses_gpu


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    here = settings.machine()
    read = settings.read("train", arguments, here)
    if read is None:
        return 0
    name, composed = read
    config = composed.config
    if config.trainer.val_only:
        return evaluate.evaluate(name, config, here)
    with RunFolder.open(settings.run_path(name, config), yaml_text(composed.values)) as folder:
        if folder.finished(config.trainer.total_training_steps):
            sys.stdout.write(f"{folder.path} is finished; give trainer.experiment_name another name for a new run\n")
            return 0
        sys.stdout.write(f"run folder: {folder.path}\n")
        sys.stdout.flush()
        # Torch, Ray and transformers take seconds to import: only now, when the settings are known to be right.
        importlib.import_module("vrl.controller.launch").launch(config, folder, uses_gpu(config, here))
    sys.stdout.write(f"done: {folder.path}\n")
    return 0
