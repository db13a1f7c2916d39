"""One interpreter process as the tool process sees it: requests and answers, output, limits, its end.

    tool process --channel--> request frame: code or images           interpreter (process 1 of its namespaces)
                 <--channel-- answer frame: error, sizes and pixels of images
                 <---pipe---- everything printed, in order, also by child processes

The code of a cell can write to both. A frame that is not the one waited for ends the interpreter.
Between cells it is stopped by a signal, so that threads left behind use nothing.
"""

import contextlib
import enum
import os
import select
import shutil
import signal
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, final

from vrl.agent.sandbox.guest.frames import FrameError, FrameReader, encode_frame
from vrl.agent.sandbox.usage import Usage, usage_of
from vrl.protocol.config.sandbox import SandboxConfig

_CHUNK_BYTES = 1 << 18
_FLOOD_BYTES = 64 << 20
_INTERRUPT_SECONDS = 0.5
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.02, 0.05
_END_SECONDS = 5.0
_LEFT_BEHIND_LOOKS = 10
# The limit of a single process strikes first, with an exception that leaves the variables alone.
_MEMORY_SLACK, _COPIED_BYTES = 1.1, 32 << 20


class Ending(enum.Enum):
    """How an exchange came to its end."""

    ANSWERED = enum.auto()
    DIED = enum.auto()
    TIME = enum.auto()
    MEMORY = enum.auto()
    PROCESSES = enum.auto()
    FLOOD = enum.auto()
    GARBLED = enum.auto()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What one request brought."""

    ending: Ending
    interrupted: bool  # the time limit was hit, whatever came after
    output: bytes
    output_bytes: int  # all that was printed
    answer: dict[str, Any]
    pixels: list[bytes]
    seconds: float


@final
class _Output:
    """The beginning of what was printed, and how much there was."""

    def __init__(self, descriptor: int, keep_bytes: int) -> None:
        self.descriptor = descriptor
        self._keep_bytes = keep_bytes
        self.kept = bytearray()
        self.total = 0
        self.closed = False

    def read(self) -> bool:
        """Read what is there, at most one chunk; return whether there was any."""
        try:
            data = os.read(self.descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self.total += len(data)
        self.kept += data[: self._keep_bytes - len(self.kept)]
        return bool(data)

    def drain(self) -> None:
        """Read what is still in the pipe."""
        while self.total < _FLOOD_BYTES and self.read():
            pass


@final
class Interpreter:
    """A process that runs cells. Used by one thread at a time; `kill` may come from another."""

    def __init__(
        self, channel: socket.socket, output: int, pid: int, folder: str | None, config: SandboxConfig
    ) -> None:
        self._channel = channel
        self._output = output
        self._pid = pid
        self._process = os.pidfd_open(pid)
        self._folder = folder  # on this machine, only without namespaces
        self._config = config
        self._requests = 0
        self._ended = False
        self._lock = threading.Lock()  # of the process descriptor
        self._base_bytes = usage_of(pid, config.processes).memory_bytes
        channel.setblocking(False)
        os.set_blocking(output, False)

    @property
    def process_id(self) -> int:
        """The process on this machine."""
        return self._pid

    def exchange(self, request: dict[str, Any], blobs: list[bytes], seconds: float) -> Exchange:
        """Send a request and wait for its answer, `seconds` at most. Ends the process unless the answer is in order."""
        self._requests += 1
        self._signal(signal.SIGCONT)
        began = time.monotonic()
        wait = _Wait(
            self._channel, _Output(self._output, 4 * self._config.output_chars), self._reader(), began + seconds
        )
        wait.outgoing = memoryview(encode_frame({**request, "id": self._requests}, blobs))
        ending = self._wait(wait)
        if ending is Ending.ANSWERED and wait.answer[0].get("id") != self._requests:
            ending = Ending.GARBLED
        if ending is Ending.ANSWERED:
            ending = self._rest()
        if ending is not Ending.ANSWERED:
            self.end()
        return Exchange(
            ending=ending,
            interrupted=wait.interrupted,
            output=bytes(wait.output.kept),
            output_bytes=wait.output.total,
            answer=wait.answer[0],
            pixels=wait.answer[1],
            seconds=time.monotonic() - began,
        )

    def kill(self) -> None:
        """Kill the process and all it started, from any thread; `end` is still to be called."""
        self._signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill the process and all it started, wait until they are gone, and remove what they left."""
        self.kill()
        with self._lock:
            if self._ended:
                return
            self._ended = True
            poll = select.poll()
            poll.register(self._process, select.POLLIN)
            poll.poll(_END_SECONDS * 1000)
            os.close(self._process)
        os.close(self._output)
        self._channel.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, wait: "_Wait") -> Ending:
        look = _FIRST_LOOK_SECONDS
        while True:
            ending = wait.step(look)
            if ending is not None:
                wait.output.drain()
                return ending
            if wait.late():
                if wait.interrupted:
                    return Ending.TIME
                wait.interrupted = True
                wait.deadline += _INTERRUPT_SECONDS
                self._signal(signal.SIGINT)
            if time.monotonic() >= wait.next_look:
                ending = self._over_limit(usage_of(self._pid, self._config.processes))
                if ending is not None:
                    return ending
                look = _LOOK_SECONDS
                wait.next_look = time.monotonic() + look

    def _over_limit(self, usage: Usage) -> Ending | None:
        if usage.tasks > self._config.processes + 1:
            return Ending.PROCESSES
        base = self._base_bytes * max(1, usage.processes)
        most = base + int((self._config.memory_mib << 20) * _MEMORY_SLACK) + _COPIED_BYTES
        return Ending.MEMORY if usage.memory_bytes > most else None

    def _rest(self) -> Ending:
        """Look what the cell left behind, then stop the process until the next one."""
        for _ in range(_LEFT_BEHIND_LOOKS):
            usage = usage_of(self._pid, self._config.processes)
            if usage.processes <= 1:
                break
            time.sleep(0.005)  # killed by the interpreter, not yet gone
        else:
            return Ending.PROCESSES
        self._signal(signal.SIGSTOP)
        return self._over_limit(usage) or (Ending.ANSWERED if usage.processes else Ending.DIED)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self._ended:
                signal.pidfd_send_signal(self._process, number)

    def _reader(self) -> FrameReader:
        config = self._config
        return FrameReader(4096 + 12 * config.output_chars, 3 * config.image_pixels * config.images)


@final
class _Wait:
    """The state of one exchange while it is under way."""

    def __init__(self, channel: socket.socket, output: _Output, reader: FrameReader, deadline: float) -> None:
        self._channel = channel
        self._reader = reader
        self.output = output
        self.outgoing = memoryview(b"")
        self.deadline = deadline
        self.next_look = time.monotonic() + _FIRST_LOOK_SECONDS
        self.interrupted = False
        self.answer: tuple[dict[str, Any], list[bytes]] = ({}, [])

    def late(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() >= self.deadline

    def step(self, seconds: float) -> Ending | None:
        """Wait for something to happen and take it in."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self.outgoing else 0))
        if not self.output.closed:
            poll.register(self.output.descriptor, select.POLLIN)
        left = min(seconds, max(0.0, self.deadline - time.monotonic()))
        events = dict(poll.poll(left * 1000))
        if events.get(self.output.descriptor, 0) and not self.output.read():
            self.output.closed = True  # by the code of the cell, in all its processes
        if self.output.total > _FLOOD_BYTES:
            return Ending.FLOOD
        try:
            return self._talk(events.get(self._channel.fileno(), 0))
        except FrameError:
            return Ending.GARBLED
        except (BrokenPipeError, ConnectionResetError):
            return Ending.DIED

    def _talk(self, events: int) -> Ending | None:
        if events & select.POLLOUT:
            with contextlib.suppress(BlockingIOError):
                self.outgoing = self.outgoing[self._channel.send(self.outgoing[:_CHUNK_BYTES]) :]
        if not events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            return None
        try:
            data = self._channel.recv(min(self._reader.wanted, _CHUNK_BYTES))
        except BlockingIOError:
            return None
        if not data:
            return Ending.DIED
        frame = self._reader.feed(data)
        if frame is None:
            return None
        self.answer = frame
        return Ending.ANSWERED
