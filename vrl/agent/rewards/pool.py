"""Reward processes of one rollout worker: `RewardPool`, driven from the worker's own loop without a thread.

    rollout loop --submit--> waiting --frame--> process 0..n-1 (one request each)
                 <--poll/wait-- answers; a process over its time limit is killed and replaced

Processes are started by `subprocess`, never forked from the worker: the worker holds torch, a model and an engine. They
die with the thread that started them, so the pool belongs to the worker's main thread.
"""

import contextlib
import json
import logging
import math
import pickle
import selectors
import time
from collections import deque
from dataclasses import replace
from typing import final

from vrl.agent.child_process import ChildProcess
from vrl.agent.rewards.types import RewardRequest, RewardSpec, Score
from vrl.agent.rewards.wire import frame
from vrl.protocol.errors import ConfigError, RewardError
from vrl.protocol.trajectory import Prompt

_LOG = logging.getLogger(__name__)
_START_LIMIT_SECONDS = 120.0
_MAX_STARTS_IN_A_ROW = 3


def check_rewards(spec: RewardSpec, start_limit_seconds: float = _START_LIMIT_SECONDS) -> None:
    """Load everything `spec` names in one reward process and end it again. Called before training starts.

    Raises ConfigError with the message for the user when something is missing or does not load.
    """
    RewardPool(1, 1.0, spec, start_limit_seconds).close()


@final
class PendingReward:
    """A reward that was asked for; `score` is there once `done()`."""

    __slots__ = ("_score", "request")

    def __init__(self, request: RewardRequest) -> None:
        self.request = request
        self._score: Score | None = None

    def done(self) -> bool:
        """Return whether the score is there."""
        return self._score is not None

    @property
    def score(self) -> Score:
        """The outcome. Asking before `done()` is a mistake of ours."""
        assert self._score is not None, "the reward is not there yet: poll() or wait() first"
        return self._score

    def resolve(self, score: Score) -> None:
        """Called by the pool, once."""
        assert self._score is None
        self._score = score


@final
class _Process:
    """One reward process as its pool sees it: what it is working on, and until when."""

    def __init__(self, spec_frame: bytes, start_limit_seconds: float) -> None:
        self.child = ChildProcess("vrl.agent.rewards.process", spec_frame)
        self.ready = False
        self.pending: PendingReward | None = None
        self.deadline = time.monotonic() + start_limit_seconds

    def become_ready(self) -> None:
        self.ready = True
        self.deadline = math.inf

    def assign(self, pending: PendingReward, time_limit_seconds: float) -> None:
        self.pending = pending
        self.deadline = time.monotonic() + time_limit_seconds

    def finish(self, score: Score) -> None:
        assert self.pending is not None
        self.pending.resolve(score)
        self.pending = None
        self.deadline = math.inf


@final
class RewardPool:
    """Scores episodes in processes that can be killed; the `RewardScorer` of a rollout worker.

    Each process works on one request at a time, so a time limit names the call that ran over it. Nothing happens
    outside `submit`, `poll` and `wait`; a worker that polls rarely gets its scores late, never a wrong time limit.
    """

    def __init__(
        self,
        workers: int,
        time_limit_seconds: float,
        spec: RewardSpec,
        start_limit_seconds: float = _START_LIMIT_SECONDS,
    ) -> None:
        """Start the processes and wait until all are ready.

        Raises ConfigError when the functions of `spec` cannot be loaded, RewardError when the processes die of it.
        """
        if workers < 1 or not time_limit_seconds > 0:
            raise ConfigError(
                f"a reward pool needs workers >= 1 and a time limit > 0 s, got {workers} and {time_limit_seconds}"
            )
        self._time_limit_seconds = time_limit_seconds
        self._start_limit_seconds = start_limit_seconds
        self._spec_frame = frame(pickle.dumps(replace(spec, time_limit_seconds=time_limit_seconds)))
        self._selector = selectors.DefaultSelector()
        self._waiting: deque[tuple[PendingReward, bytes]] = deque()
        self._processes: list[_Process] = []
        self._failed_starts = 0
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._processes += [self._start() for _ in range(workers)]
            while not all(process.ready for process in self._processes):
                self._pump(self._seconds_to_deadline())
            on_failure.pop_all()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, prompt: Prompt, response_text: str) -> PendingReward:
        """Ask for the score of one finished episode; it starts at once if a process is free."""
        request = RewardRequest(prompt.data_source, response_text, prompt.ground_truth, prompt.extra_info)
        pending = PendingReward(request)
        try:
            payload = pickle.dumps(request)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            pending.resolve(
                Score.failed("bad value", f"ground_truth or extra_info cannot be sent to a process: {error}")
            )
            return pending
        self._waiting.append((pending, payload))
        self._dispatch()
        return pending

    def poll(self) -> None:
        """Read what has arrived and hand out what waits; returns at once. Called between engine steps."""
        self._pump(0.0)

    def wait(self, timeout_seconds: float = math.inf) -> bool:
        """Wait until every score is there, at most this long; return whether they are."""
        end = time.monotonic() + timeout_seconds
        while self.num_pending:
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._pump(min(left, self._seconds_to_deadline()))
        return True

    @property
    def num_pending(self) -> int:
        """Requests without a score yet."""
        return len(self._waiting) + sum(process.pending is not None for process in self._processes)

    def process_ids(self) -> list[int]:
        """Return the ids of the reward processes, for accounting of memory and CPU."""
        return [process.child.pid for process in self._processes]

    def close(self) -> None:
        """End all processes and what they started. Unfinished requests stay without a score."""
        while self._processes:
            self._processes.pop().child.end()
        self._waiting.clear()
        self._selector.close()

    def _pump(self, timeout_seconds: float) -> None:
        for key, events in self._selector.select(None if timeout_seconds == math.inf else timeout_seconds):
            process: _Process = key.data
            if events & selectors.EVENT_WRITE:
                process.child.send(self._selector)
            if events & selectors.EVENT_READ:
                self._read(process)
        now = time.monotonic()
        for process in [late for late in self._processes if now > late.deadline and not late.child.receiving]:
            self._stop_late(process)
        self._dispatch()

    def _seconds_to_deadline(self) -> float:
        soonest = min(process.deadline for process in self._processes)
        return max(soonest - time.monotonic(), 0.001)  # not 0: a late process that is sending its answer is left alone

    def _dispatch(self) -> None:
        if not self._waiting:
            return
        for process in self._processes:
            if self._waiting and process.ready and process.pending is None:
                pending, payload = self._waiting.popleft()
                process.assign(pending, self._time_limit_seconds)
                process.child.send(self._selector, frame(payload))

    def _read(self, process: _Process) -> None:
        payloads = process.child.receive()
        if payloads is None:
            self._replace_dead(process)
            return
        for payload in payloads:
            answer = json.loads(payload)
            if process.ready:
                process.finish(Score(**answer))
            elif answer["error"] is not None:
                raise ConfigError(answer["error"])
            else:
                process.become_ready()
                self._failed_starts = 0

    def _stop_late(self, process: _Process) -> None:
        if not process.ready:
            raise ConfigError(
                f"the reward functions did not load within {self._start_limit_seconds:g} s; "
                "see what the file of custom_reward_function.path does when it is imported"
            )
        _LOG.warning("a reward ran over its time limit of %g s; its process is replaced", self._time_limit_seconds)
        self._replace(process)
        process.finish(
            Score.failed("time limit", f"the reward function was stopped after {self._time_limit_seconds:g} s")
        )

    def _replace_dead(self, process: _Process) -> None:
        if not process.ready:
            self._failed_starts += 1
        if self._failed_starts >= _MAX_STARTS_IN_A_ROW:
            raise RewardError(
                f"reward processes end with exit code {process.child.end()} before they are ready; "
                "what they wrote to standard error says why"
            )
        exit_code = self._replace(process)
        _LOG.warning("a reward process ended with exit code %d and is replaced", exit_code)
        if process.pending is not None:
            process.finish(
                Score.failed("process died", f"the reward process ended with exit code {exit_code} while scoring")
            )

    def _start(self) -> _Process:
        process = _Process(self._spec_frame, self._start_limit_seconds)
        process.child.watch(self._selector, process)
        return process

    def _replace(self, process: _Process) -> int:
        self._selector.unregister(process.child.connection)
        exit_code = process.child.end()
        self._processes[self._processes.index(process)] = self._start()
        return exit_code
