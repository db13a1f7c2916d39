"""What the sandbox sees of this machine, and the command that starts it in bubblewrap.

Read-only: the interpreter and its standard library, the packages numpy, PIL, matplotlib and what those need, the shared
libraries these load, and our own programs in `guest`. Nothing else: no home, no /etc, no other package, no model file.

    /python/bin/python3, /python/lib/pythonX.Y   interpreter, standard library without its site-packages
    /packages                                    numpy, PIL, matplotlib, ...
    /lib                                         shared libraries
    /program/vrl/agent/sandbox/guest             our programs
    /dev/{null,zero,full,random,urandom}         devices without state
    /tmp, /dev/shm                               each session's own, empty
"""

import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from packaging.requirements import Requirement

from vrl.protocol.errors import SandboxError

PACKAGES = ("numpy", "pillow", "matplotlib")
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}
_GUEST = Path(__file__).parent / "guest"
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ZYGOTE_FOLDER_BYTES = 32 << 20  # matplotlib's font list


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Files of this machine by the path they have in the sandbox."""

    files: dict[str, str]

    def bind_arguments(self) -> list[str]:
        """Return bubblewrap's arguments for a read-only root that holds only these files."""
        arguments: list[str] = []
        folders = {str(parent) for path in (*self.files, "/dev/shm/x", "/proc/x") for parent in Path(path).parents}
        for folder in sorted(folders - {"/"}):
            arguments += ["--perms", "0755", "--dir", folder]
        for inside, outside in self.files.items():
            arguments += ["--ro-bind", outside, inside]
        for device in _DEVICES:
            arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
        packages = f"/python/lib/{_version_folder()}/site-packages"
        if (Path(sysconfig.get_path("stdlib")) / "site-packages").is_dir():
            arguments += ["--tmpfs", packages]
        arguments += ["--proc", "/proc", "--perms", "0777", "--size", str(_ZYGOTE_FOLDER_BYTES), "--tmpfs", "/tmp"]
        return [*arguments, "--remount-ro", "/"]


@functools.cache
def machine_view() -> View:
    """Look once what the interpreter of this process needs. Raises SandboxError when a package is not installed."""
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    packages = dict(_package_files())
    executable = os.path.realpath(sys.executable)
    files = {"/python/bin/python3": executable, f"/python/lib/{_version_folder()}": str(standard)}
    files |= {f"/packages/{name}": str(path) for name, path in sorted(packages.items())}
    files[_loader(executable)] = _loader(executable)
    folders = {str(path.parent) for path in packages.values()}
    inside = tuple(f"{path.resolve()}/" for path in (standard, *map(Path, folders)))
    for library in _shared_libraries(standard, folders):
        if not os.path.realpath(library).startswith(inside):
            files[f"/lib/{os.path.basename(library)}"] = os.path.realpath(library)
    return View(files=files | {f"/program/vrl/agent/sandbox/guest/{path.name}": str(path) for path in _programs()})


def zygote_command(settings: dict[str, object]) -> list[str]:
    """Return the command of the zygote inside the view."""
    return ["/python/bin/python3", "-S", "-s", "-B", _inside("zygote.py"), json.dumps(settings)]


def zygote_environment() -> dict[str, str]:
    """Return the whole environment of the sandbox."""
    return {
        "PYTHONHOME": "/python",
        "PYTHONPATH": "/program:/packages",
        "SANDBOX_PROGRAM": "/program",
        "LD_LIBRARY_PATH": "/lib",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "MPLCONFIGDIR": "/tmp/matplotlib",
        **ONE_THREAD,
    }


def _inside(name: str) -> str:
    return f"/program/vrl/agent/sandbox/guest/{name}"


def _programs() -> list[Path]:
    return sorted(path for path in _GUEST.glob("*.py") if path.name != "__init__.py")


def _version_folder() -> str:
    return f"python{sys.version_info.major}.{sys.version_info.minor}"


def _package_files() -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of the top-level files and folders of the packages and of what they require."""
    waiting: list[str] = list(PACKAGES)
    known: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in known:
            continue
        known.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise SandboxError(
                f"the code sandbox shows the package {name} to programs, and it is not installed"
            ) from error
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
        for top in sorted({file.parts[0] for file in distribution.files or ()}):
            if top not in {"..", "__pycache__"} and not top.endswith((".dist-info", ".egg-info", ".pth")):
                yield top, Path(str(distribution.locate_file(top)))


def _shared_libraries(standard: Path, folders: set[str]) -> list[str]:
    """Return the shared objects that a process with everything imported has loaded."""
    program = Path(__file__).with_name("libraries.py")
    command = [sys.executable, "-I", "-S", str(program), str(standard / "lib-dynload"), *sorted(folders)]
    try:
        result = subprocess.run(
            command, env=ONE_THREAD, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=120
        )
    except (subprocess.SubprocessError, OSError) as error:
        raise SandboxError(f"cannot find out which libraries the code sandbox needs: {error}") from error
    return json.loads(result.stdout)


def _loader(executable: str) -> str:
    """Return the path of the program loader that an executable names."""
    with open(executable, "rb") as file:
        match = re.search(rb"/[\x21-\x7e]+/ld-[\x21-\x7e]+", file.read(1 << 16))
    if match is None:
        raise SandboxError(f"{executable} is no dynamically linked program; the code sandbox needs one")
    return match.group().decode()
