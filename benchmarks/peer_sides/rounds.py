"""The two ends of an interleaved measurement: a side answers on request, the driver asks one side after the other.

Runs in every environment: nothing here needs more than psutil. A side is a process of its own Python that prints its
case names and versions, then answers each line `case` with one JSON object.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO, final

import psutil

ROOT = Path(__file__).resolve().parents[2]
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
ENVIRONMENT = THREADS | {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore",
}
# glibc gives large blocks back at once or keeps them, by what was freed before; then a copy costs its page faults, up
# to four times the copy itself, or not. For single operations it is told to keep them, on both sides.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**40)}


@final
@dataclass(frozen=True, slots=True)
class Case:
    """What is timed: `run(prepare())`, of which only `run` counts.

    One answer is the mean over as many calls as take `seconds` of this process's CPU time, but at most `most_calls`.
    """

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    seconds: float = 0.01
    most_calls: int = 1000


def measure(case: Case) -> dict[str, float]:
    """Return CPU (this process) and wall seconds of one call."""
    cpu = wall = 0.0
    calls = 0
    while cpu < case.seconds and calls < case.most_calls:
        argument = case.prepare()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        result = case.run(argument)
        cpu += time.process_time() - cpu_begin
        wall += time.perf_counter() - begin
        calls += 1
        del argument, result
    return {"cpu_s": cpu / calls, "wall_s": wall / calls, "calls": calls}


def private_stdout() -> TextIO:
    """Return what was standard output, and send everything else that is printed to standard error."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of installed packages."""
    return {name: metadata.version(name) for name in packages}


def serve(cases: Mapping[str, Case], facts: Mapping[str, Any], channel: TextIO) -> None:
    """Answer until the driver hangs up. `facts` (versions, sizes, results to compare) go out first."""
    channel.write(json.dumps({"cases": list(cases), **facts}) + "\n")
    for line in sys.stdin:
        channel.write(json.dumps(measure(cases[line.strip()])) + "\n")


def tree_cpu(root: psutil.Process) -> float:
    """Return the CPU seconds of a process and all below it, also of those that ended and were waited for."""
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


@final
class Side:
    """The driver's handle of one side."""

    def __init__(self, name: str, command: Sequence[str], log: Path, extra: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **(extra or {})},
            )  # fmt: skip
        self.facts = self._answer()
        self.cases: list[str] = self.facts.pop("cases")

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text().splitlines()[-15:])
            raise RuntimeError(f"{self.name} ended (log: {self._log}):\n{tail}")
        return json.loads(line)

    def ask(self, case: str) -> dict[str, float]:
        """Have one case measured; `tree_s` is the CPU time of all its processes together, a call."""
        assert self._process.stdin is not None
        root = psutil.Process(self._process.pid)
        before = tree_cpu(root)
        self._process.stdin.write(case + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return answer | {"tree_s": (tree_cpu(root) - before) / answer.get("calls", 1)}

    def close(self) -> None:
        """Let the side end by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)


@final
@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles over rounds."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of one value or more."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high)


Samples = dict[str, list[dict[str, float]]]  # by side, a round each


def interleaved(sides: Sequence[Side], case: str, rounds: int, warm_ups: int = 1) -> Samples:
    """Measure a case that all sides have, in turn, the order reversed every round."""
    out: Samples = {side.name: [] for side in sides}
    for number in range(rounds + warm_ups):
        for side in sides if number % 2 else reversed(sides):
            answer = side.ask(case)
            if number >= warm_ups:
                out[side.name].append(answer)
    return out
