"""Proportional memory (PSS) of all processes of a run: `python benchmarks/run_memory.py -- bash train_ppo.sh ...`.

Prints the peak, what it was after step 5 and at the end (medians of 20 s, it goes up and down within a step), and the
same for each kind of process. Shared memory that processes map counts in their PSS.
"""

import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil

INTERVAL_SECONDS = 1.0
WINDOW = 20  # samples
FROM_STEP = 5
MIB = 2**20


def pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def kind_of(process: psutil.Process) -> str:
    """Return a short name of what a process does."""
    words = process.cmdline()
    if not words:
        return "gone"
    if words[0].startswith("ray::"):
        return words[0].split(".")[0].strip()
    name = next((word for word in words[1:] if word.endswith(".py") or word.startswith("vrl")), words[0])
    return Path(name).name


def sample(root: int) -> Counter[str]:
    """Return the bytes of each kind of process below `root`, itself included."""
    found: Counter[str] = Counter()
    top = psutil.Process(root)
    for process in (top, *top.children(recursive=True)):
        try:
            found[kind_of(process)] += pss_bytes(process.pid)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def median(samples: list[Counter[str]]) -> dict[str, float]:
    """Return the median MiB of each kind of process, and of all together."""
    kinds = {kind for found in samples for kind in found}
    out = {kind: statistics.median(found[kind] for found in samples) / MIB for kind in kinds}
    return out | {"all": statistics.median(found.total() for found in samples) / MIB}


def main() -> None:
    """Run the command, sample, print."""
    command = sys.argv[sys.argv.index("--") + 1 :]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            lines.append(line)

    reader = threading.Thread(target=read)
    reader.start()
    samples: list[tuple[bool, Counter[str]]] = []
    while process.poll() is None:
        trained = any(line.split()[:1] == ["step"] and line.split()[1].startswith(f"{FROM_STEP}/") for line in lines)
        try:
            samples.append((trained, sample(process.pid)))
        except psutil.NoSuchProcess:
            break
        time.sleep(INTERVAL_SECONDS)
    reader.join()
    print(f"{len(samples)} samples; peak {max(s.total() for _, s in samples) / MIB:.0f} MiB")
    after = [found for trained, found in samples if trained][:-4]  # the last ones see processes end
    if after:
        first, last = median(after[:WINDOW]), median(after[-WINDOW:])
        growth = last["all"] / first["all"] - 1
        print(f"from step {FROM_STEP} to the end: {first['all']:.0f} to {last['all']:.0f} MiB ({100 * growth:+.1f} %)")
        for kind in sorted(first | last, key=lambda kind: -last.get(kind, 0.0)):
            print(f"  {kind:24s} {first.get(kind, 0.0):7.0f} to {last.get(kind, 0.0):7.0f} MiB")
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
