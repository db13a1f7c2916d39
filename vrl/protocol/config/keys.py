"""The names of all settings: dotted keys, their types, and the nearest known name of a mistyped one.

The override step and the builder refuse unknown names with it; `reference` writes the base file from it.
"""

import dataclasses
import difflib
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from vrl.protocol.config.schema import Config

PLAIN_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}


@functools.cache
def type_hints(section: Any) -> Mapping[str, Any]:
    """Return the field types of a settings class by name."""
    return get_type_hints(section)


def walk(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, type) of every key below a settings class, a section before what is in it."""
    for name, kind in type_hints(section).items():
        yield prefix + name, kind
        if dataclasses.is_dataclass(kind):
            yield from walk(kind, f"{prefix}{name}.")


@functools.cache
def key_types() -> Mapping[str, Any]:
    """Return the type of every key of `Config`, sections included."""
    return dict(walk(Config))


def leaf_keys() -> list[str]:
    """Return every key that holds a value, in the order of the classes."""
    return [key for key, kind in key_types().items() if not dataclasses.is_dataclass(kind)]


def is_open(key: str) -> bool:
    """Whether the key names an open dictionary."""
    return get_origin(key_types().get(key)) is dict


def parents(key: str) -> Iterator[str]:
    """Yield the key itself and everything above it, nearest first."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def in_open(key: str) -> bool:
    """Whether the key lies below an open dictionary."""
    return any(is_open(parent) for parent in parents(key.rpartition(".")[0]))


def nearest(key: str) -> list[str]:
    """Return the known keys that a mistyped one most likely means: one as a rule, none or up to three where it is open.

    A name that is spelled rightly but stands in the wrong section counts as near, wherever it belongs.
    """
    above = set(parents(key))
    names = [name for name in key_types() if name not in above]
    last, section = key.rpartition(".")[2], key.rpartition(".")[0]
    whole = [name for name in names if name.endswith(f".{key}")]
    moved = whole or [name for name in names if name.rpartition(".")[2] == last]
    if moved:
        return difflib.get_close_matches(key, moved, n=3, cutoff=0.0)
    siblings = [name for name in names if name.rpartition(".")[0] == section]
    for pool, cutoff in ((siblings, 0.6), (names, 0.8)):
        ends = {name.rpartition(".")[2]: name for name in pool}
        close = difflib.get_close_matches(last, ends, n=2, cutoff=cutoff)
        if close:  # of two that are near, the one with the same letters
            return [ends[min(close, key=lambda name: sorted(name) != sorted(last))]]
    return difflib.get_close_matches(key, names, n=1, cutoff=0.6)


def describe_type(kind: Any) -> str:
    """Return a type in words: `a whole number or null`, `a list of text`, `'skip' or 'stop'`."""
    if kind in PLAIN_NAMES:
        return PLAIN_NAMES[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(arg) for arg in args)
    if origin is tuple and args[-1] is Ellipsis:
        return f"a list of {describe_type(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)} values ({', '.join(describe_type(arg) for arg in args)})"
    if origin is dict:
        return "a dictionary"
    if dataclasses.is_dataclass(kind):
        return "a section with keys of its own"
    return " or ".join(repr(value) for value in args)
