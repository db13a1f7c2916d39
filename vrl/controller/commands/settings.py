"""From a sub-command's arguments to checked settings: config name, `--cfg job`, overrides. Imports nothing heavy."""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from vrl.controller.compose import CONFIG_DIR, Composed, load, yaml_text
from vrl.protocol.config.package_rules import OPTIONAL
from vrl.protocol.config.rules import Machine, check
from vrl.protocol.config.schema import Config

CPU_DEFAULT = "tiny_vl_agent"
GPU_DEFAULT = "qwen2_5_vl_7b_geo3k_grpo"


def machine() -> Machine:
    """Look at this machine, without torch."""
    packages = frozenset(name for name in OPTIONAL if importlib.util.find_spec(name) is not None)
    return Machine(gpus=_gpu_count(), cores=len(os.sched_getaffinity(0)), packages=packages)


def _gpu_count() -> int:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    listed = subprocess.run([tool, "--list-gpus"], capture_output=True, text=True, timeout=30, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def read(command: str, arguments: Sequence[str], here: Machine) -> tuple[str, Composed] | None:
    """Return the config's name and the settings; None when `--cfg job` printed them and nothing is to run.

    Raises ConfigError for anything that could not run, before it starts.
    """
    parser = argparse.ArgumentParser(prog=f"vrl {command}", description=__doc__)
    parser.add_argument("--config-name", default=GPU_DEFAULT if here.gpus else CPU_DEFAULT, help="file in configs/")
    parser.add_argument("--config-path", type=Path, default=CONFIG_DIR, help="folder of config files")
    parser.add_argument("--cfg", choices=["job"], help="print the settings and end")
    parser.add_argument("overrides", nargs="*", help="key=value, as in Hydra")
    given = parser.parse_intermixed_args(arguments)
    composed = load(given.config_name, given.overrides, given.config_path)
    for note in composed.notes:
        sys.stderr.write(f"note: {note}\n")
    if given.cfg:
        sys.stdout.write(yaml_text(composed.values))
        return None
    if not here.gpus:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns when transformers saves a model
    for warning in check(composed.config, here):
        sys.stderr.write(f"warning: {warning}\n")
    return Path(given.config_name).stem, composed


def run_path(config_name: str, config: Config) -> Path:
    """Return the run folder: as set, else by project, config name and the time, so that a second run is a new one."""
    trainer = config.trainer
    if trainer.default_local_dir is not None:
        return Path(trainer.default_local_dir)
    return Path("outputs") / trainer.project_name / (trainer.experiment_name or f"{config_name}-{timestamp()}")


def timestamp() -> str:
    """Return the time as part of a name."""
    return time.strftime("%Y%m%d-%H%M%S")
