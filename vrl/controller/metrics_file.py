"""`metrics.jsonl` of a run: one JSON object a step. Written by the tracker, whatever other loggers there are."""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

_LOG = logging.getLogger(__name__)
_STEP = "training/global_step"


@final
class MetricsFile:
    """Appends steps; every line is on disk when `log` returns.

    Keys are sorted behind the step and numbers have their shortest exact form, so that equal runs give equal files. A
    number that is not finite is null. What is logged for the step of the last line joins that line.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        """Open the file of a run that goes on after `resume_step`.

        Lines of later steps are dropped: those steps run again. With 0 an earlier file is set aside under another name.
        """
        self._path = path
        if path.exists() and resume_step == 0:
            set_aside(path)
        lines = _cut(path, resume_step) if path.exists() else []
        self._last: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        self._start = sum(len(line) for line in lines[:-1])
        path.touch()
        self._file = path.open("r+b")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the metrics of a step."""
        numbers = {name: _number(metrics[name]) for name in sorted(metrics) if name != _STEP}
        if self._last.get(_STEP) == step:
            known = self._last | numbers
            numbers = {name: known[name] for name in sorted(known) if name != _STEP}
            self._file.seek(self._start)
        else:
            self._start = self._file.seek(0, os.SEEK_END)
        self._last = {_STEP: step, **numbers}
        self._file.write(json.dumps(self._last).encode() + b"\n")
        self._file.truncate()  # after the write: a kill between leaves no step without its line

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def set_aside(path: Path) -> Path:
    """Rename a file of an earlier run to `<name>.<k><suffix>` with the first free k; return its new path."""
    number = 1
    while (other := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(other)
    _LOG.info("%s of an earlier run is now %s", path.name, other)
    return other


def _cut(path: Path, step: int) -> list[bytes]:
    """Keep the lines up to a step, and return them. Lines that a kill left half-written go too."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if (found := _step_of(line)) is not None and found <= step]
    if len(kept) < len(lines):
        part = path.with_name(f"{path.name}.tmp")
        part.write_bytes(b"".join(kept))
        part.replace(path)
        _LOG.warning("%s: dropped %d lines; the run goes on after step %d", path, len(lines) - len(kept), step)
    return kept


def _step_of(line: bytes) -> int | None:
    if not line.endswith(b"\n"):
        return None
    try:
        return int(json.loads(line)[_STEP])
    except (ValueError, KeyError, TypeError):
        return None


def _number(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
