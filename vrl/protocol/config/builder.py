"""Nested plain dictionaries to `Config` and back. `controller.compose` calls it with what was composed.

Types are checked, not guessed: a whole number may stand for a number or a text, a single value for a list of one;
true and false are no numbers.
"""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from vrl.protocol.config.keys import describe_type, type_hints
from vrl.protocol.config.legacy import explain_unknown
from vrl.protocol.config.schema import Config
from vrl.protocol.errors import ConfigError

Section = TypeVar("Section")
MISMATCH = object()  # returned by the converters: the value does not fit


def build(values: Mapping[str, Any]) -> Config:
    """Return the settings; keys that are left out keep their defaults.

    Raises ConfigError with the full dotted key: an unknown one with the nearest known name, a wrong value with the type
    that is wanted.
    """
    return fill(Config(), values)


def fill(section: Section, values: Mapping[str, Any], prefix: str = "") -> Section:
    """Return a section with some values replaced, checked like `build`; `prefix` is its dotted key and a dot."""
    hints = type_hints(type(section))
    changed: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in hints:
            raise ConfigError(explain_unknown(key))
        if dataclasses.is_dataclass(hints[name]) and isinstance(value, Mapping):
            changed[name] = fill(getattr(section, name), cast(Mapping[str, Any], value), f"{key}.")
            continue
        changed[name] = _convert(hints[name], value)
        if changed[name] is MISMATCH:
            raise ConfigError(f"{key}={value!r}: {describe_type(hints[name])} is wanted")
    return dataclasses.replace(section, **changed)  # type: ignore[type-var]


def to_dict(section: Any) -> dict[str, Any]:
    """Return a section as nested dictionaries of plain values (tuples as lists); `build` makes an equal one of it."""
    return {field.name: _plain(getattr(section, field.name)) for field in dataclasses.fields(section)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast(Sequence[Any], value)]
    return value


def _convert(kind: Any, value: Any) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        candidates = (_convert(arg, value) for arg in args)
        return next((item for item in candidates if item is not MISMATCH), MISMATCH)
    if origin is Literal:
        return value if value in args else MISMATCH
    if origin is tuple:
        return _convert_tuple(args, value)
    if origin is dict:
        return _plain(value) if isinstance(value, Mapping) else MISMATCH
    return _convert_plain(kind, value)


def _convert_plain(kind: Any, value: Any) -> Any:
    if type(value) is kind:  # exact: bool is a subclass of int
        return value
    if type(value) is int and kind in (float, str):
        return kind(value)
    return MISMATCH


def _convert_tuple(args: tuple[Any, ...], value: Any) -> Any:
    items = list(cast(Sequence[Any], value)) if isinstance(value, list | tuple) else [value]
    kinds = [args[0]] * len(items) if args[-1] is Ellipsis else list(args)
    if len(kinds) != len(items):
        return MISMATCH
    built = tuple(_convert(kind, item) for kind, item in zip(kinds, items, strict=True))
    return MISMATCH if MISMATCH in built else built
