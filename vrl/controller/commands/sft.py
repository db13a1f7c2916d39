"""`vrl sft`: supervised fine-tuning of `actor_rollout_ref.model.path` on `warm_start.files`; prints the new folder."""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace

from vrl.controller.commands import settings
from vrl.protocol.config.rules import uses_gpu


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    here = settings.machine()
    read = settings.read("sft", arguments, here)
    if read is None:
        return 0
    config = read[1].config
    config = replace(config, warm_start=replace(config.warm_start, enable=True))
    folder = importlib.import_module("vrl.controller.launch").fine_tune(config, uses_gpu(config, here))
    sys.stdout.write(f"done: {folder}\n")
    return 0
