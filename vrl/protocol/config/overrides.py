"""The override list of a command line, made fit for composing. `controller.compose` calls `normalise` before Hydra.

An override is `key=value`, `+key=value`, `++key=value`, `~key` or `~key=value` in Hydra's notation; the value stays
as it is.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import final

from vrl.protocol.config.keys import in_open, key_types
from vrl.protocol.config.legacy import dropped, explain_unknown, neutral, other_unit, renamed
from vrl.protocol.errors import ConfigError

FORM = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=\s]+?)(?P<tail>=(?P<value>.*))?", re.DOTALL)

# Old spellings of values, by the last part of the key they belong to.
VALUES = {
    "dtype": {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"},
    "resume_from_path": {"false": "null"},
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Normalised:
    """What to compose with, and what to tell the user."""

    overrides: tuple[str, ...]
    notes: tuple[str, ...]


def normalise(overrides: Sequence[str], groups: Collection[str] = ()) -> Normalised:
    """Return the overrides with today's keys; every known key is written so that it may be new or known to the file.

    Args:
        overrides: as typed.
        groups: names of the config groups (folders beside the config files); overrides of these pass untouched.

    Raises:
        ConfigError: for an unknown key, with the nearest known one; for a key without counterpart that is not
            at its neutral value; for an old and a new name with different values; for anything that is no override.
    """
    kept: list[str] = []
    values: dict[str, tuple[str, str]] = {}
    notes: list[str] = []
    for text in overrides:
        match = FORM.fullmatch(text.strip())
        if match is None or (match["tail"] is None and match["sign"] != "~"):
            raise ConfigError(f"{text!r} is no setting: write key=value, without blanks around =")
        if "@" in match["key"] or match["key"].partition("/")[0] in groups:
            kept.append(text)
            continue
        key, note = _resolve(match["key"], match["value"])
        if note:
            notes.append(note)
        if key is None:
            continue
        _refuse_two_values(values, key, match["key"], match["value"] or "")
        kept.append(_write(key, match["sign"], match["value"]))
    return Normalised(overrides=tuple(kept), notes=tuple(notes))


def _resolve(key: str, value: str | None) -> tuple[str | None, str | None]:
    """Return today's key (None: leave it out) and a note."""
    if key in key_types():
        return key, None
    new_key = renamed(key)
    if new_key is not None:
        final_key, note = _resolve(new_key, value)
        return final_key, f"{key} is {new_key} here{other_unit(key)}" if final_key else note
    if in_open(key):
        return key, None
    reason = dropped(key)
    if reason is not None:
        return None, f"{key} has no effect: {reason}"
    only = neutral(key)
    if only is None:
        raise ConfigError(explain_unknown(key))
    allowed, reason = only
    if value is not None and value.strip().strip("'\"").lower() not in allowed:
        raise ConfigError(f"{key}={value} is not possible: {reason}; leave it out")
    return None, f"{key} has no effect: {reason}"


def _refuse_two_values(values: dict[str, tuple[str, str]], key: str, typed: str, value: str) -> None:
    """Note a value; the same name twice is the user's correction, two names are a contradiction."""
    earlier_name, earlier = values.get(key, (typed, value))
    if earlier_name != typed and earlier != value:
        raise ConfigError(f"{earlier_name}={earlier} and {typed}={value} are the same setting: leave one out")
    values[key] = (typed, value)


def _write(key: str, sign: str | None, value: str | None) -> str:
    if sign == "~":
        return f"~{key}" if value is None else f"~{key}={value}"
    spelled = VALUES.get(key.rpartition(".")[2], {}).get((value or "").lower(), value)
    return f"++{key}={spelled}"
