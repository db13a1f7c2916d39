"""What a look at processes finds: memory of their own, and shared memory once."""

import subprocess
import sys

import pytest

from vrl.agent.sandbox.usage import usage_of

MIB = 1 << 20
# Each process says a dot when it has written, and ends with its standard input.
PROGRAM = """
import mmap, os, sys
flags = {"shared": mmap.MAP_SHARED, "private": mmap.MAP_PRIVATE}[sys.argv[1]] | mmap.MAP_ANONYMOUS
before = mmap.mmap(-1, 16 << 20, flags)
before[::4096] = bytes(16 << 8)
child = os.fork()
if sys.argv[2] == "again":
    after = mmap.mmap(-1, 16 << 20, flags)
    after[::4096] = bytes(16 << 8)
os.write(1, b".")
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("kind", "again", "mib"), [("shared", "once", 16), ("shared", "again", 48), ("private", "again", 64)]
)
def test_shared_memory_of_several_processes_counts_once(kind: str, again: str, mib: int):
    command = [sys.executable, "-S", "-c", PROGRAM, kind, again]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == b".."
        usage = usage_of(process.pid, 10)
        assert process.stdin is not None
        process.stdin.close()
    assert usage.processes == 2
    assert mib * MIB <= usage.memory_bytes < (mib + 15) * MIB
