"""What the processes of one interpreter use, read from /proc of this machine.

Limits of the kernel count per process. A sum over processes needs either a cgroup, which an ordinary user often may not
make, or somebody who adds up: the thread that waits for a cell looks here some twenty times a second.
"""

import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import final

_PAGE_BYTES = resource.getpagesize()
_RSS_SHMEM = re.compile(rb"^RssShmem:\s*([0-9]+) kB", re.MULTILINE)
_PSS_SHMEM = re.compile(rb"^Pss_Shmem:\s*([0-9]+) kB", re.MULTILINE)
_SMALL_KIB = 1024  # of a process; below it the share of each page is not asked for, which walks all its pages


@final
@dataclass(frozen=True, slots=True)
class Usage:
    """One look at a process and all its descendants."""

    processes: int
    tasks: int  # threads of all of them
    memory_bytes: int  # resident and in no file of a disk; memory that several share counts once; see `usage_of`


def usage_of(pid: int, most_processes: int) -> Usage:
    """Add up `pid` and its descendants; stops looking once there are more than `most_processes`.

    Pages copied on write from the zygote count in each process. Files in /tmp count while they are mapped, else their
    file system's own limit holds.
    """
    waiting, processes, tasks, pages, shared_kib = [pid], 0, 0, 0, 0
    while waiting and processes <= most_processes:
        folder = Path("/proc", str(waiting.pop()))
        try:
            _, resident, shared, *_ = (folder / "statm").read_text().split()
            threads = list((folder / "task").iterdir())
            for thread in threads:
                waiting += map(int, (thread / "children").read_text().split())
            shared_kib += _shared_kib(folder)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        processes += 1
        tasks += len(threads)
        pages += max(0, int(resident) - int(shared))
    return Usage(processes, tasks, pages * _PAGE_BYTES + (shared_kib << 10))


def _shared_kib(folder: Path) -> int:
    """Return a process's part of the shared memory that it maps: a page of n processes counts one n-th in each."""
    whole = _RSS_SHMEM.search((folder / "status").read_bytes())
    if whole is None or int(whole[1]) <= _SMALL_KIB:
        return 0
    try:
        part = _PSS_SHMEM.search((folder / "smaps_rollup").read_bytes())
    except PermissionError:
        part = None
    return int((part or whole)[1])
