"""A user's Python file, and a class by name: `module:Class`, `package.module.Class` or `path/to/file.py:Class`."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from vrl.protocol.errors import ConfigError


def load_class(name: str, key: str) -> type[Any]:
    """Return the class that `name` names; a relative file is taken from the working folder.

    Modules beside a file can be imported by it. Raises ConfigError that begins with `key` when there is no such file,
    module or class, or importing it fails.
    """
    place, separator, class_name = name.rpartition(":")
    if not separator:
        place, _, class_name = name.rpartition(".")
    if not place or not class_name.isidentifier():
        raise ConfigError(f"{key}={name!r}: give module:Class, package.module.Class or path/to/file.py:Class")
    module = import_file(Path(place), key) if place.endswith(".py") else _import_module(place, key)
    found = vars(module).get(class_name)
    if not inspect.isclass(found):
        own = sorted(n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__)
        raise ConfigError(
            f"{key}={name!r}: {place} has no class {class_name}; it has {', '.join(own) or 'no class at all'}"
        )
    return found


def import_file(path: Path, key: str) -> ModuleType:
    """Return the module of a Python file, which is run once a process; a relative one is taken from the working folder.

    Modules beside it can be imported by it. Raises ConfigError that begins with `key` when there is no such file or
    importing it fails.
    """
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {path}")
    name = f"vrl_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:  # what is taken from one file shares its module
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}: {path} is no Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up there
    sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{key}: importing {path} failed with {type(error).__name__}: {error}") from error
    return module


def construct(kind: type[Any], key: str, **arguments: Any) -> Any:
    """Return `kind(**arguments)`. Raises ConfigError that begins with `key` when it takes other arguments or fails."""
    try:
        return kind(**arguments)
    except Exception as error:
        raise ConfigError(
            f"{key}: {kind.__name__}({', '.join(arguments)}) failed with {type(error).__name__}: {error}"
        ) from error


def _import_module(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: importing {name} failed with {type(error).__name__}: {error}") from error
