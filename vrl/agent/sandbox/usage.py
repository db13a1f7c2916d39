"""What the processes of one interpreter use, read from /proc of this machine.

Limits of the kernel count per process. A sum over processes needs either a cgroup, which an ordinary user often may not
make, or somebody who adds up: the thread that waits for a cell looks here some twenty times a second.
"""

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import final

_PAGE_BYTES = resource.getpagesize()


@final
@dataclass(frozen=True, slots=True)
class Usage:
    """One look at a process and all its descendants."""

    processes: int
    tasks: int  # threads of all of them
    private_bytes: int  # resident, shared with nobody or copied on write from the zygote; files in /tmp do not count


def usage_of(pid: int, most_processes: int) -> Usage:
    """Add up `pid` and its descendants; stops looking once there are more than `most_processes`."""
    waiting, processes, tasks, pages = [pid], 0, 0, 0
    while waiting and processes <= most_processes:
        folder = Path("/proc", str(waiting.pop()))
        try:
            _, resident, shared, *_ = (folder / "statm").read_text().split()
            threads = list((folder / "task").iterdir())
            for thread in threads:
                waiting += map(int, (thread / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        processes += 1
        tasks += len(threads)
        pages += max(0, int(resident) - int(shared))
    return Usage(processes, tasks, pages * _PAGE_BYTES)
