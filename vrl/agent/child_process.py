"""A process that serves its parent over a socket: started by `subprocess`, never forked from a process with torch.

The parent's half is `ChildProcess`, driven by a pool; the child's half is `serve_parent`. Reward and tool processes are
such processes: they die with the thread that started them, so that thread must be the one that lives longest.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import final

import vrl
from vrl.agent.rewards.wire import FrameBuffer

_READ_BYTES = 1 << 18
_PACKAGE_ROOT = str(Path(vrl.__file__).parents[1])
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_PR_SET_PDEATHSIG = 1


@final
class ChildProcess:
    """The parent's end: frames in and out without waiting, when the selector given to `watch` says so."""

    def __init__(self, module: str, first_frame: bytes) -> None:
        """Start `python -m module PARENT_PID` with the socket as its standard input; the frame waits to be sent."""
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-u", "-m", module, str(os.getpid())],
                stdin=theirs.fileno(),
                env=os.environ | _ONE_THREAD | {"PYTHONPATH": _python_path()},
                start_new_session=True,  # Ctrl-C goes to the worker only; children of user code share the group
            )
        self._outgoing = bytearray(first_frame)
        self._incoming = FrameBuffer()

    @property
    def pid(self) -> int:
        """The process id, also that of its group."""
        return self._popen.pid

    @property
    def receiving(self) -> bool:
        """True while a frame has begun to arrive and is not complete."""
        return self._incoming.has_part

    def watch(self, selector: selectors.BaseSelector, data: object) -> None:
        """Let a selector report with `data` when frames arrive and when there is room for what waits to be sent."""
        selector.register(self.connection, selectors.EVENT_READ, data)
        self.send(selector)

    def send(self, selector: selectors.BaseSelector, data: bytes = b"") -> None:
        """Send what the socket takes now. If something is left over, the selector says when to call this again."""
        self._outgoing += data
        try:
            del self._outgoing[: self.connection.send(self._outgoing)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):  # it died; reading will say so
            self._outgoing.clear()
        events = selectors.EVENT_READ | selectors.EVENT_WRITE if self._outgoing else selectors.EVENT_READ
        key = selector.get_key(self.connection)
        if key.events != events:
            selector.modify(self.connection, events, key.data)

    def receive(self) -> list[bytes] | None:
        """Return the frames that have arrived, or None when the process is gone."""
        try:
            data = self.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            return None
        return self._incoming.feed(data) if data else None

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._popen.poll() is not None

    def hang_up(self) -> None:
        """Send nothing more: a child that is well ends by itself."""
        with contextlib.suppress(OSError):  # it has ended already
            self.connection.shutdown(socket.SHUT_WR)

    def end(self, grace_seconds: float = 0.0) -> int:
        """Kill the process and what it started, after a grace; return its exit code (its own, where it had ended)."""
        if grace_seconds:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace_seconds)
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(self._popen.pid, signal.SIGKILL)
        return self._popen.wait()


def serve_parent() -> socket.socket:
    """Tie this process to its parent, and return the socket that came as standard input.

    User code and its child processes see an empty standard input instead, and print to standard error.
    """
    _die_with_parent(int(sys.argv[1]))
    connection = socket.socket(fileno=os.dup(0))  # not inherited by children
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return connection


def _die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process with its parent: a function that hangs would never see the socket close."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request was made
        sys.exit(1)


def _python_path() -> str:
    inherited = os.environ.get("PYTHONPATH")
    return _PACKAGE_ROOT if not inherited else f"{_PACKAGE_ROOT}{os.pathsep}{inherited}"
