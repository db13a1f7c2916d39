"""`vrl model RECIPE OUT`: build a model folder (tiny_qwen2_5_vl, tiny_qwen2, tiny_agent, smollm2)."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vrl.controller.prepare import build_model
from vrl.protocol.errors import ConfigError


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(prog="vrl model", description=__doc__)
    parser.add_argument("recipe", help="tiny (both tiny models), tiny_qwen2_5_vl, tiny_qwen2, tiny_agent or smollm2")
    parser.add_argument("out", type=Path, help="folder to write; with `tiny`, the folder of both")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    recipes = ["tiny_qwen2_5_vl", "tiny_qwen2"] if given.recipe == "tiny" else [given.recipe]
    for recipe in recipes:
        folder = given.out / recipe if given.recipe == "tiny" else given.out
        if folder.exists():
            raise ConfigError(f"{folder} exists; remove it or give another folder")
        build_model(recipe, folder, given.seed)
        sys.stdout.write(f"{folder}\n")
    return 0
