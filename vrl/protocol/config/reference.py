"""The base config file and the list of keys, both written from the settings classes and their comments.

`python -m vrl.protocol.config.reference configs/ppo_trainer.yaml tests/protocol/config/keys.txt` writes them; tests
compare.
"""

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vrl.protocol.config.keys import leaf_keys
from vrl.protocol.config.schema import Config

FIELD_LINE = re.compile(r"^    (?P<name>\w+): .*?  # (?P<comment>.+)$", re.MULTILINE)
HEADER = """\
# All settings with their defaults: the base of every other config file. Written from vrl/protocol/config by
# python -m vrl.protocol.config.reference; do not edit.
"""


def comments(section: Any) -> dict[str, str]:
    """Return the comment of every field that has one."""
    return {match["name"]: match["comment"] for match in FIELD_LINE.finditer(inspect.getsource(section))}


def yaml_text() -> str:
    """Return `configs/ppo_trainer.yaml`: every key with its default and its comment."""
    return HEADER + "\n".join(_section_lines(Config(), 0)) + "\n"


def keys_text() -> str:
    """Return `keys.txt`: every key that holds a value, one a line."""
    return "\n".join(leaf_keys()) + "\n"


def _section_lines(section: Any, depth: int) -> Iterator[str]:
    notes = comments(type(section))
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield f"{'  ' * depth}{field.name}:"
            yield from _section_lines(value, depth + 1)
            continue
        yield f"{'  ' * depth}{field.name}: {_scalar(value)}  # {notes[field.name]}"


def _scalar(value: Any) -> str:
    """Return a value in YAML; a small number keeps its point, without which YAML 1.1 reads a text."""
    text = value if isinstance(value, str) and value.isidentifier() else json.dumps(value)
    return re.sub(r"^(-?\d+)e", r"\1.0e", text) if isinstance(value, float) else text


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(yaml_text(), encoding="utf-8")
    Path(sys.argv[2]).write_text(keys_text(), encoding="utf-8")
