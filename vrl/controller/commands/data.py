"""`vrl data RECIPE OUT`: write tiny or reasoning-gym tasks, or convert files of gsm8k or geo3k to verl's format."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vrl.controller.prepare import write_data
from vrl.data.convert import CONVERTERS, convert
from vrl.protocol.errors import ConfigError


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(prog="vrl data", description=__doc__)
    parser.add_argument(
        "recipe", help=f"tiny, tiny_agent, reasoning_gym, or a converter: {', '.join(sorted(CONVERTERS))}"
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--input", type=Path, help="what a converter reads: a file or folder")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    if given.recipe not in CONVERTERS:
        write_data(given.recipe, given.out, given.seed)
        sys.stdout.write(f"{given.out}\n")
        return 0
    if given.input is None:
        raise ConfigError(f"vrl data {given.recipe} reads files that you have: give --input")
    for split, rows in convert(given.recipe, given.input, given.out).items():
        sys.stdout.write(f"{given.out / split}.parquet: {rows} rows\n")
    return 0
