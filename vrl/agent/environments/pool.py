"""Tool processes of one rollout worker: `EnvironmentPool`, driven from the worker's own loop without a thread.

    turn loop --start/step/close--> process 0..n-1 (each holds many episodes and runs their calls side by side)
              <--poll-- results; a process that dies fails its own episodes only and is replaced

Which of several calls under way brought a process down, nobody sees: all of their episodes are suspects, and the loop
starts them again in a process of their own where few calls run at a time, and in the end one. There a death has one
cause.

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
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, final

from vrl.agent.child_process import ChildProcess
from vrl.agent.environments.wire import (
    Close,
    EnvironmentSpec,
    Finish,
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

    __slots__ = ("_asked", "_outcome", "_sent")

    def __init__(self) -> None:
        self._asked = time.perf_counter()
        self._sent: float | None = None
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

    @property
    def held_seconds(self) -> float:
        """Time that the pool held it back, since other calls were not to run beside it."""
        return (time.perf_counter() if self._sent is None else self._sent) - self._asked

    def sent(self) -> None:
        """Called by the pool when it goes to its process."""
        self._sent = time.perf_counter()

    def resolve(self, outcome: StepOutcome) -> None:
        """Called by the pool, once."""
        assert self._outcome is None
        self._outcome = outcome


@final
class _Process:
    """One tool process as its pool sees it."""

    def __init__(self, spec_frame: bytes, start_limit_seconds: float, most_calls: int | None) -> None:
        self.child = ChildProcess("vrl.agent.environments.process", spec_frame)
        self.start_deadline = time.monotonic() + start_limit_seconds
        self.ready = False
        self.retired = False
        self.episodes: set[int] = set()
        self.starting: set[int] = set()
        self.pending: dict[int, PendingStep] = {}
        self.most_calls = most_calls  # under way at a time; None for a process that is under no suspicion
        self.under_way: set[int] = set()  # whose they are
        self.waiting: deque[tuple[int, bytes]] = deque()  # the calls behind them, each with its episode
        self.heard = time.monotonic()
        self.pinged: float | None = None  # when it was asked whether it runs; None once it has answered

    def suspects(self) -> set[int]:
        """Return the episodes whose calls are under way."""
        return self.starting | set(self.pending) if self.most_calls is None else set(self.under_way)

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
        self._lost: dict[int, StepOutcome] = {}  # episodes whose environment is gone, and why
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

    def start(self, prompt: Prompt, most_calls: int | None = None) -> int:
        """Let the environment of a new episode start in the process that has fewest; return the episode's number.

        With `most_calls` that is a further process, where so many calls run at a time; it ends with its last episode.
        """
        self._next += 1
        episode = self._next
        if most_calls is not None and not self._open(most_calls):
            self._add_process(most_calls)
        process = min(self._open(most_calls), key=lambda p: len(p.episodes))
        self._home[episode] = process
        process.episodes.add(episode)
        try:
            data = frame(pickle.dumps(Start(episode, prompt)))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            self._lost[episode] = StepOutcome(failure=f"bad value: the row cannot be sent to a process: {error}")
            return episode
        process.starting.add(episode)
        self._call(process, episode, data)
        return episode

    def _open(self, most_calls: int | None) -> list[_Process]:
        """Return the processes with such a limit that take new episodes."""
        return [process for process in self._processes if not process.retired and process.most_calls == most_calls]

    def step(self, episode: int, text: str, cut: bool = False) -> PendingStep:
        """Act on a model turn, which a limit may have `cut`; an earlier call of the episode must be done."""
        return self._ask(Step(episode, text, cut))

    def finish(self, episode: int) -> PendingStep:
        """Ask the environment for the reward of the whole episode, which the result holds; then close the episode."""
        return self._ask(Finish(episode))

    def _ask(self, request: Step | Finish) -> PendingStep:
        pending = PendingStep()
        lost = self._lost.get(request.episode)
        if lost is not None:
            pending.resolve(lost)
        else:
            process = self._home[request.episode]
            process.pending[request.episode] = pending
            self._call(process, request.episode, frame(pickle.dumps(request)))
        return pending

    def _call(self, process: _Process, episode: int, data: bytes) -> None:
        """Send a call; where few run at a time, behind those that were asked for before."""
        process.waiting.append((episode, data))
        self._send_calls(process)

    def _send_calls(self, process: _Process) -> None:
        """Send the calls that wait and may run; those of an episode one after the other."""
        behind: deque[tuple[int, bytes]] = deque()
        while process.waiting and (process.most_calls is None or len(process.under_way) < process.most_calls):
            episode, data = process.waiting.popleft()
            if process.most_calls is not None and episode in process.under_way:
                behind.append((episode, data))
            elif episode in process.episodes:
                process.under_way.add(episode)
                pending = process.pending.get(episode)
                if pending is not None:
                    pending.sent()
                process.child.send(self._selector, data)
        process.waiting.extendleft(reversed(behind))

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
            if process.most_calls is None:
                self._add_process()
        process.under_way.discard(episode)
        self._send_calls(process)
        if (process.retired or process.most_calls is not None) and not process.episodes:
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

    def _answer(self, process: _Process, payload: bytes) -> None:
        episode = episode_of(payload)
        process.starting.discard(-episode)
        process.under_way.discard(abs(episode))
        self._send_calls(process)
        pending = process.pending.pop(episode, None)
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
        suspects = process.suspects() & process.episodes if process.ready else set[int]()
        _LOG.warning(
            "a tool process ended with exit code %d; it had %d episodes, %d of them with a call under way",
            code,
            len(process.episodes),
            len(suspects),
        )
        failure = f"process died: the tool process ended with exit code {code}"
        if silent:
            failure = f"process died: the tool process did not answer for {self._silence_limit_seconds:g} s"
        for episode in process.episodes:
            charged = episode in suspects if len(suspects) == 1 else not suspects
            self._lost[episode] = StepOutcome(failure=failure, charged=charged, suspect=episode in suspects)
            self._home.pop(episode, None)
        for episode, pending in process.pending.items():
            pending.resolve(self._lost[episode])
        if not process.retired and process.most_calls is None:
            self._add_process()

    def _add_process(self, most_calls: int | None = None) -> None:
        process = _Process(self._spec_frame, self._start_limit_seconds, most_calls)
        self._processes.append(process)
        process.child.watch(self._selector, process)

    def _take_out(self, process: _Process) -> None:
        self._processes.remove(process)
        self._selector.unregister(process.child.connection)
