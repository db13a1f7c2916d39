"""The folders `global_step_N` of a run: complete or absent, whatever moment the run was killed at. Used by `RunFolder`.

    global_step_N.tmp --files, manifest, fsync--> rename --> global_step_N --> pointer file --> prune

The manifest is the last file written and lists all others with their sizes, so that a damaged or half-copied folder
does not pass for a checkpoint. Its serial number tells which checkpoint was written last: a run that was taken back to
an earlier step writes smaller steps than those that lie there already.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"global_step_(\d+)")
_UNFINISHED = ".tmp"
_REPLACED = ".old.tmp"
MANIFEST = "manifest.json"


@final
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    serial: int


@final
class CheckpointFolders:
    """The checkpoints below one folder; `pointer` is the text file that names the newest step."""

    def __init__(self, folder: Path, pointer: Path) -> None:
        self._folder = folder
        self._pointer = pointer

    def recover(self) -> None:
        """Clear up after a kill: finish a checkpoint that only lacked its name, remove one that was being written."""
        if not self._folder.is_dir():
            return
        left = sorted(self._folder.glob(f"global_step_*{_UNFINISHED}"), key=lambda path: path.name.endswith(_REPLACED))
        for path in left:
            target = path.with_name(path.name.removesuffix(_REPLACED).removesuffix(_UNFINISHED))
            if read(path) is not None and not target.exists():
                path.rename(target)
                _LOG.warning("%s was complete and lacked only its name when the run ended", target)
            else:
                shutil.rmtree(path)
                _LOG.warning("removed %s, which was being written when the run ended", path)

    def complete(self) -> list[Checkpoint]:
        """Return all complete checkpoints, the one written last at the end."""
        found = [read(path) for path in self._folder.glob("global_step_*") if _NAME.fullmatch(path.name)]
        return sorted((one for one in found if one is not None), key=lambda one: (one.serial, one.step))

    def latest(self) -> Path | None:
        """Return the complete checkpoint that was written last. The pointer file is not asked: it may be behind."""
        for path in sorted(self._folder.glob("global_step_*")):
            if _NAME.fullmatch(path.name) and read(path) is None:
                _LOG.warning("%s is passed over: files that its %s lists are missing or cut short", path, MANIFEST)
        complete = self.complete()
        return complete[-1].path if complete else None

    @contextmanager
    def writing(self, step: int, max_keep: int | None) -> Iterator[Path]:
        """Yield an empty folder to fill; when the block ends it becomes `global_step_<step>` and old ones are pruned.

        A block that fails leaves nothing behind. `max_keep` is the number of checkpoints to keep, None for all; the
        new one always stays.
        """
        target = self._folder / f"global_step_{step}"
        part = target.with_name(target.name + _UNFINISHED)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            yield part
            self._seal(part, step)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        self._name(part, target)
        self._point_to(step)
        self._prune(max_keep)

    def _seal(self, part: Path, step: int) -> None:
        """Bring all files to the disk, then the manifest that lists them."""
        files = sorted(path for path in part.rglob("*") if path.is_file())
        for path in (*files, *(path for path in part.rglob("*") if path.is_dir())):
            _to_disk(path)
        serial = max((one.serial for one in self.complete()), default=0) + 1
        sizes = {str(path.relative_to(part)): path.stat().st_size for path in files}
        write_whole(part / MANIFEST, json.dumps({"step": step, "serial": serial, "files": sizes}, indent=1))

    def _name(self, part: Path, target: Path) -> None:
        """Give a sealed folder its name. One of the same step is moved out of the way first."""
        old = target.with_name(target.name + _REPLACED)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        part.rename(target)
        _to_disk(self._folder)
        shutil.rmtree(old, ignore_errors=True)

    def _point_to(self, step: int) -> None:
        write_whole(self._pointer, f"{step}\n")

    def _prune(self, max_keep: int | None) -> None:
        for old in self.complete()[: -max(max_keep, 1)] if max_keep is not None else []:
            doomed = old.path.with_name(old.path.name + _REPLACED)
            old.path.rename(doomed)  # first: a half-removed folder must not look like a damaged checkpoint
            shutil.rmtree(doomed)
            _LOG.info("removed the checkpoint of step %d: max_actor_ckpt_to_keep=%s", old.step, max_keep)


def read(path: Path) -> Checkpoint | None:
    """Return what a folder holds; None when it is no complete checkpoint."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        whole = all((path / name).stat().st_size == size for name, size in manifest["files"].items())
        return Checkpoint(path, int(manifest["step"]), int(manifest["serial"])) if whole else None
    except (OSError, ValueError, KeyError):
        return None


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that a reader, also after a kill, sees the old text or the new one."""
    part = path.with_name(path.name + _UNFINISHED)
    part.write_text(text, encoding="utf-8")
    _to_disk(part)
    part.replace(path)
    _to_disk(path.parent)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
