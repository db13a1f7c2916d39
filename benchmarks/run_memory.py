"""Proportional memory (PSS) of all processes of a run: `python benchmarks/run_memory.py -- bash train_ppo.sh ...`.

Prints the peak, and how the second half of the run went. Shared memory that processes map counts in their PSS.
"""

import subprocess
import sys
import time
from pathlib import Path

import psutil

INTERVAL_SECONDS = 2.0


def pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main() -> None:
    """Run the command, sample, print."""
    command = sys.argv[sys.argv.index("--") + 1 :]
    process = subprocess.Popen(command)
    samples: list[float] = []
    while process.poll() is None:
        try:
            family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        except psutil.NoSuchProcess:
            break
        samples.append(sum(pss_bytes(pid) for pid in family) / 2**30)
        time.sleep(INTERVAL_SECONDS)
    print(f"{len(samples)} samples; peak {max(samples):.2f} GiB")
    tail = samples[len(samples) // 2 : -3]
    if tail:
        print(f"second half of the run: first {tail[0]:.2f}, last {tail[-1]:.2f}, largest {max(tail):.2f} GiB")
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
