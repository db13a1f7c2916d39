"""Speed of the code sandbox, and what a thousand cells leave behind: `python benchmarks/sandbox.py [--cells N]`.

Three parts: trivial cells in sessions that live; sessions of one cell; and cells of which a third are endless, deaf to
interrupts, forking, hungry or flooding. After the last part the processes, open files, temporary files and memory of
this program are compared with those before it; anything left ends the program with exit code 1.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from vrl.agent.sandbox.local import LocalRunner, LocalSession
from vrl.agent.sandbox.usage import usage_of
from vrl.protocol.config.sandbox import SandboxConfig

THREADS = 4
BAD = (
    "while True: pass",
    "import time\nwhile True:\n    try: time.sleep(9)\n    except BaseException: pass",
    "import os\nwhile True: os.fork()",
    "import os, time\nfor n in range(8):\n    if os.fork() == 0:\n        a = b'x' * (64 << 20)\n"
    "        time.sleep(9)\ntime.sleep(9)",
    "a = []\nwhile True: a.append(bytearray(1 << 23))",
    "import os\nwhile True: os.write(1, bytes(1 << 20))",
    "n = 0\nwhile True:\n    open(str(n), 'wb').write(bytes(1 << 16))\n    n += 1",
)
TRIVIAL = "x = 1\nx + 1"


def in_threads(work: Callable[[int], None]) -> float:
    """Run `work(thread)` in all threads; return the seconds it took."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - began


def report(name: str, seconds: float, latencies: list[float]) -> None:
    """Print one line."""
    quantiles = statistics.quantiles(latencies, n=20)
    print(
        f"{name:<28} {len(latencies) / seconds:8.1f} a second   median {quantiles[9] * 1000:7.2f} ms   "
        f"p95 {quantiles[18] * 1000:7.2f} ms"
    )


def trivial_cells(runner: LocalRunner, cells: int) -> None:
    """Cells in one session a thread."""
    latencies: list[float] = []

    def work(_: int) -> None:
        session = runner.session()
        session.run(TRIVIAL)
        for _ in range(cells // THREADS):
            latencies.append(session.run(TRIVIAL).seconds)
        session.close()

    report("trivial cells", in_threads(work), latencies)


def short_sessions(runner: LocalRunner, sessions: int) -> None:
    """A new session for each cell."""
    latencies: list[float] = []

    def work(_: int) -> None:
        for _ in range(sessions // THREADS):
            began = time.monotonic()
            session = runner.session()
            assert session.run(TRIVIAL).output == "2\n"
            session.close()
            latencies.append(time.monotonic() - began)

    report("sessions of one cell", in_threads(work), latencies)


def mixed_cells(runner: LocalRunner, cells: int) -> dict[str, int]:
    """A third of the cells bad; return how they ended."""
    endings = {"well": 0, "error": 0, "lost": 0}
    lock = threading.Lock()

    def work(thread: int) -> None:
        session: LocalSession = runner.session()
        for number in range(thread, cells, THREADS):
            bad = number % 3 == 0
            result = session.run(BAD[number // 3 % len(BAD)] if bad else TRIVIAL)
            assert (result.error is not None) == bad, result
            with lock:
                endings["lost" if result.lost else "error" if result.error else "well"] += 1
        session.close()

    seconds = in_threads(work)
    print(f"{'mixed cells':<28} {cells / seconds:8.1f} a second   {endings}")
    return endings


def state(runner: LocalRunner | None = None) -> dict[str, int]:
    """Return what could grow: descendants, open files, files, memory of this program and of the sandbox in MiB."""
    own = psutil.Process()
    sandbox = 0 if runner is None else usage_of(runner.process_ids()[0], 10_000).memory_bytes >> 20
    return {
        "processes": len(own.children(recursive=True)),
        "open files": own.num_fds(),
        "threads": own.num_threads(),
        "working folders": sum(1 for _ in Path(tempfile.gettempdir()).glob("vrl-cells-*")),
        "shared memory files": sum(1 for _ in Path("/dev/shm").iterdir()),
        "MiB": own.memory_info().rss >> 20,
        "MiB of the sandbox": sandbox,
    }


def sandbox_at_rest(runner: LocalRunner, config: SandboxConfig) -> bool:
    """Wait until only bubblewrap (twice), the zygote and the ready interpreters are there."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if usage_of(runner.process_ids()[0], 10_000).processes == 3 + config.pool_size:
            return True
        time.sleep(0.05)
    return False


def main() -> int:
    """Measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=1000)
    arguments = parser.parse_args()
    config = SandboxConfig(cell_seconds=0.5, memory_mib=256, processes=24, file_mib=16, pool_size=4)
    nothing = state()
    began = time.monotonic()
    with LocalRunner(config) as runner:
        session = runner.session()
        session.run(TRIVIAL)
        print(f"first cell after {time.monotonic() - began:.2f} s")
        session.close()
        trivial_cells(runner, arguments.cells)
        short_sessions(runner, arguments.cells // 4)
        mixed_cells(runner, max(30, arguments.cells // 10))  # what grows once, such as buffers, has grown then
        at_rest = sandbox_at_rest(runner, config)
        before = state(runner)
        mixed_cells(runner, arguments.cells)
        at_rest = at_rest and sandbox_at_rest(runner, config)
        after = state(runner)
    end = state()
    print(f"before {before}\nafter  {after}\nclosed {end}")
    grown = [name for name in after if after[name] > before[name] + (8 if "MiB" in name else 0)]
    left = [name for name in end if "MiB" not in name and end[name] > nothing[name]]
    print(f"at rest: {at_rest}; grown: {grown or 'nothing'}; left after closing: {left or 'nothing'}")
    return 0 if at_rest and not grown and not left else 1


if __name__ == "__main__":
    sys.exit(main())
