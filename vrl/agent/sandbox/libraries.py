"""Which shared libraries an interpreter needs: `python -I -S libraries.py EXTENSION_FOLDER FOLDER...`, run by `view`.

Imports the standard library's extension modules, numpy, PIL and matplotlib, and writes the paths of all shared objects
that are then loaded to standard output, as JSON. The names are those the loader asked for, links not followed.
"""

import contextlib
import ctypes
import importlib
import json
import os
import sys
from pathlib import Path
from typing import final

_NOT_NEEDED = ("_tkinter", "_test", "_xx", "xx", "_ctypes_test", "readline", "_curses", "nis", "_dbm", "_gdbm")
_WARM = (
    "numpy",
    "numpy.linalg",
    "numpy.fft",
    "numpy.random",
    "PIL.Image",
    "PIL.ImageFont",
    "PIL._webp",
    "PIL._imagingft",
)
_WARM += ("matplotlib.pyplot", "matplotlib.backends.backend_agg")


@final
class _LoadedObject(ctypes.Structure):
    """The first fields of struct dl_phdr_info."""

    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


def loaded_objects() -> list[str]:
    """Return the paths of the shared objects of this process."""
    found: list[str] = []

    def note(info: "ctypes._Pointer[_LoadedObject]", _size: int, _data: object) -> int:
        if info.contents.name:
            found.append(os.fsdecode(info.contents.name))
        return 0

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_LoadedObject), ctypes.c_size_t, ctypes.c_void_p)
    ctypes.CDLL(None).dl_iterate_phdr(callback(note), None)
    return [path for path in found if path.startswith("/")]


def main() -> None:
    """Import, list, write."""
    extensions, *folders = sys.argv[1:]
    sys.path += folders
    names = {file.name.split(".")[0] for file in Path(extensions).glob("*.so")}
    for name in [*sorted(name for name in names if not name.startswith(_NOT_NEEDED)), *_WARM]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    json.dump(loaded_objects(), sys.stdout)


if __name__ == "__main__":
    main()
