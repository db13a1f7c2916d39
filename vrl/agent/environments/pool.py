"""Tool processes of one rollout worker: `EnvironmentPool`, driven from the worker's own loop without a thread.

    turn loop --start/step/close--> process 0..n-1 (each holds many episodes and runs their calls side by side)
              <--poll-- results; a process that dies fails its own episodes only and is replaced

Processes are started by `subprocess` and die with the thread that started them, so the pool belongs to the worker's
main thread. The pool knows no time limit: the loop does, and closes an episode whose call takes too long. Its process
then gets no new episode and ends with the last one it has: a thread that hangs cannot be stopped in any other way. A
process that answers no ping (some call holds the interpreter's lock) counts as dead.
"""

import contextlib
import json
import logging
import math
import pickle
import selectors
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

from vrl.agent.child_process import ChildProcess
from vrl.agent.environments.wire import (
    Close,
    EnvironmentSpec,
    Ping,
    Request,
    Start,
    Step,
    StepOutcome,
    decode_answer,
    episode_of,
)
from vrl.agent.rewards.wire import frame
from vrl.protocol.errors import ConfigError, WorkerError
from vrl.protocol.trajectory import Prompt

_LOG = logging.getLogger(__name__)
_START_LIMIT_SECONDS = 120.0
_MAX_STARTS_IN_A_ROW = 3
_GRACE_SECONDS = 5.0
_PING_SECONDS = 5.0  # of silence, before a process is asked whether it still runs
_SILENCE_LIMIT_SECONDS = 30.0  # after that, before it is killed

Schemas = Mapping[str, Sequence[Mapping[str, Any]]]


def check_environments(spec: EnvironmentSpec, start_limit_seconds: float = _START_LIMIT_SECONDS) -> Schemas:
    """Load every kind of `spec` in one tool process and end it again; return their function schemas.

    Called before training starts. Raises ConfigError with the message for the user when something does not load.
    """
    with EnvironmentPool(1, spec, start_limit_seconds) as pool:
        return pool.schemas


@final
class PendingStep:
    """A step that was asked for; `outcome` is there once `done()`."""

    __slots__ = ("_asked", "_outcome")

    def __init__(self) -> None:
        self._asked = time.perf_counter()
        self._outcome: StepOutcome | None = None

    def done(self) -> bool:
        """Return whether the outcome is there; never waits."""
        return self._outcome is not None

    @property
    def outcome(self) -> StepOutcome:
        """What came of it. Asking before `done()` is a mistake of ours."""
        assert self._outcome is not None, "the step is not done yet: poll() first"
        return self._outcome

    @property
    def seconds(self) -> float:
        """Time since it was asked for."""
        return time.perf_counter() - self._asked

    def resolve(self, outcome: StepOutcome) -> None:
        """Called by the pool, once."""
        assert self._outcome is None
        self._outcome = outcome


@final
class _Process:
    """One tool process as its pool sees it."""

    def __init__(self, spec_frame: bytes, start_limit_seconds: float) -> None:
        self.child = ChildProcess("vrl.agent.environments.process", spec_frame)
        self.start_deadline = time.monotonic() + start_limit_seconds
        self.ready = False
        self.retired = False
        self.episodes: set[int] = set()
        self.pending: dict[int, PendingStep] = {}
        self.heard = time.monotonic()
        self.pinged: float | None = None  # when it was asked whether it runs; None once it has answered

    def is_silent(self, limit_seconds: float) -> bool:
        """Whether it has not answered a ping in time."""
        return self.pinged is not None and time.monotonic() - self.pinged > limit_seconds


@final
class EnvironmentPool:
    """Runs the environments of a worker's episodes. Nothing happens outside its methods; none of them waits for a tool.

    `schemas` holds the function schemas of each kind.
    """

    def __init__(
        self,
        workers: int,
        spec: EnvironmentSpec,
        start_limit_seconds: float = _START_LIMIT_SECONDS,
        silence_limit_seconds: float = _SILENCE_LIMIT_SECONDS,
    ) -> None:
        """Start the processes and wait until all are ready.

        Raises ConfigError when a kind of `spec` cannot be made, WorkerError when the processes die of it.
        """
        if workers < 1:
            raise ConfigError(f"rollout.agent.concurrent_workers={workers}: 1 or more is wanted")
        self.schemas: Schemas = {}
        self._spec_frame = frame(pickle.dumps(spec))
        self._start_limit_seconds = start_limit_seconds
        self._silence_limit_seconds = silence_limit_seconds
        self._selector = selectors.DefaultSelector()
        self._processes: list[_Process] = []
        self._ending: list[tuple[ChildProcess, float]] = []
        self._home: dict[int, _Process] = {}
        self._lost: dict[int, str] = {}  # episodes whose environment is gone, and why
        self._next = 0
        self._failed_starts = 0
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            for _ in range(workers):
                self._add_process()
            while not all(process.ready for process in self._processes):
                self.poll(1.0)
            on_failure.pop_all()

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, prompt: Prompt) -> int:
        """Let the environment of a new episode start in the process that has fewest; return the episode's number."""
        self._next += 1
        process = min((p for p in self._processes if not p.retired), key=lambda p: len(p.episodes))
        self._home[self._next] = process
        process.episodes.add(self._next)
        try:
            data = frame(pickle.dumps(Start(self._next, prompt)))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            self._lost[self._next] = f"bad value: the row cannot be sent to a process: {error}"
            return self._next
        process.child.send(self._selector, data)
        return self._next

    def step(self, episode: int, text: str) -> PendingStep:
        """Act on a model turn in the environment of the episode; an earlier call of it must be done."""
        pending = PendingStep()
        failure = self._lost.get(episode)
        if failure is not None:
            pending.resolve(StepOutcome(failure=failure))
        else:
            process = self._home[episode]
            process.pending[episode] = pending
            self._send_request(process, Step(episode, text))
        return pending

    def close_episode(self, episode: int) -> None:
        """Give up an episode. If a call of it is under way, its process is retired."""
        self._lost.pop(episode, None)
        process = self._home.pop(episode, None)
        if process is None:
            return
        process.episodes.discard(episode)
        self._send_request(process, Close(episode))
        if process.pending.pop(episode, None) is not None and not process.retired:
            _LOG.warning("a tool call was given up; its process is replaced once its other episodes have ended")
            process.retired = True
            self._add_process()
        if process.retired and not process.episodes:
            self._take_out(process)
            process.child.hang_up()  # it closes what it holds and ends, but for the call that was given up
            self._ending.append((process.child, time.monotonic() + _GRACE_SECONDS))

    def poll(self, timeout_seconds: float = 0.0) -> None:
        """Take in what has arrived; if nothing has, wait at most so long for the first answer."""
        for key, events in self._selector.select(timeout_seconds):
            process: _Process = key.data
            if events & selectors.EVENT_WRITE:
                process.child.send(self._selector)
            if events & selectors.EVENT_READ and process in self._processes:
                self._read(process)
        self._look_after_silent_ones()
        for child, deadline in [(c, end) for c, end in self._ending if c.ended or time.monotonic() > end]:
            child.end()
            self._ending.remove((child, deadline))
        late = [p for p in self._processes if not p.ready and time.monotonic() > p.start_deadline]
        if late:
            raise ConfigError(
                f"the environments did not load within {self._start_limit_seconds:g} s; "
                "see what their modules do when they are imported"
            )

    def _look_after_silent_ones(self) -> None:
        """Ask processes that have calls under way and say nothing; replace those that have not answered."""
        ping = min(_PING_SECONDS, self._silence_limit_seconds)
        for process in [process for process in self._processes if process.ready and process.pending]:
            if process.is_silent(self._silence_limit_seconds):
                self._replace_dead(process)
            elif process.pinged is None and time.monotonic() - process.heard > ping:
                process.pinged = time.monotonic()
                process.child.send(self._selector, frame(pickle.dumps(Ping())))

    def process_ids(self) -> list[int]:
        """Return the ids of the tool processes, for accounting of memory and CPU."""
        return [process.child.pid for process in self._processes]

    def close(self) -> None:
        """Let all environments and kinds give back what they hold, then end the processes and what they started."""
        for process in self._processes:
            process.child.hang_up()
        deadline = time.monotonic() + _GRACE_SECONDS
        for child in [process.child for process in self._processes] + [child for child, _ in self._ending]:
            child.end(max(deadline - time.monotonic(), 0.01))
        self._processes.clear()
        self._ending.clear()
        self._home.clear()
        self._selector.close()

    def _send_request(self, process: _Process, request: Request) -> None:
        process.child.send(self._selector, frame(pickle.dumps(request)))

    def _read(self, process: _Process) -> None:
        payloads = process.child.receive()
        if payloads is None:
            self._replace_dead(process)
            return
        process.heard, process.pinged = time.monotonic(), None
        for payload in payloads:
            if process.ready:
                self._answer(process, payload)
            else:
                self._became_ready(process, json.loads(payload))

    def _became_ready(self, process: _Process, answer: dict[str, Any]) -> None:
        if answer["error"] is not None:
            raise ConfigError(answer["error"])
        self.schemas = answer["schemas"]
        self._failed_starts = 0
        process.ready = True
        process.start_deadline = math.inf

    @staticmethod
    def _answer(process: _Process, payload: bytes) -> None:
        pending = process.pending.pop(episode_of(payload), None)
        if pending is not None:  # else the episode was given up meanwhile
            pending.resolve(decode_answer(payload, pending.seconds))

    def _replace_dead(self, process: _Process) -> None:
        self._take_out(process)
        code = process.child.end()
        silent = process.is_silent(self._silence_limit_seconds)
        if not process.ready:
            self._failed_starts += 1
        if self._failed_starts >= _MAX_STARTS_IN_A_ROW:
            raise WorkerError(
                f"tool processes end with exit code {code} before they are ready; "
                "what they wrote to standard error says why"
            )
        _LOG.warning("a tool process ended with exit code %d; %d episodes fail by it", code, len(process.episodes))
        failure = f"process died: the tool process ended with exit code {code}"
        if silent:
            failure = f"process died: the tool process did not answer for {self._silence_limit_seconds:g} s"
        for episode in process.episodes:
            self._lost[episode] = failure
            self._home.pop(episode, None)
        for pending in process.pending.values():
            pending.resolve(StepOutcome(failure=failure))
        if not process.retired:
            self._add_process()

    def _add_process(self) -> None:
        process = _Process(self._spec_frame, self._start_limit_seconds)
        self._processes.append(process)
        process.child.watch(self._selector, process)

    def _take_out(self, process: _Process) -> None:
        self._processes.remove(process)
        self._selector.unregister(process.child.connection)
