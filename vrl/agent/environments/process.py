"""The program of one tool process: `python -m vrl.agent.environments.process PARENT_PID`, started by `pool`.

Standard input is a socket to the pool. The first frame is the spec; the answer holds the schemas of its kinds, or what
went wrong with them. Then each episode's calls run one after the other, those of different episodes at the same time in
threads, so that one that waits for a server or a sandbox holds up no other. The process never imports torch (unless a
user's file does).
"""

import contextlib
import importlib
import inspect
import json
import logging
import os
import pickle
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

from vrl.agent.child_process import serve_parent
from vrl.agent.environments.types import Environment, EnvironmentKind, Finishing, StepResult
from vrl.agent.environments.wire import (
    PONG_EPISODE,
    Close,
    EnvironmentSpec,
    Finish,
    KindSpec,
    Ping,
    Request,
    Start,
    Step,
    StepOutcome,
    encode_answer,
)
from vrl.agent.rewards.wire import frame, read_frame
from vrl.protocol.errors import ConfigError

_LOG = logging.getLogger(__name__)
_MAX_THREADS = 64  # calls under way in a process; more wait for one of them
_MAX_FAILURE_CHARACTERS = 4000
_CLOSE_SECONDS = 2.0  # for environments, and again for kinds, when the pool is closed


def main() -> None:
    """Serve the pool until it is gone."""
    connection = serve_parent()
    payload = read_frame(connection)
    if payload is None:
        return
    try:
        kinds = load_kinds(pickle.loads(payload))
        schemas = {name: [dict(schema) for schema in kind.schemas] for name, kind in kinds.items()}
        ready = json.dumps({"error": None, "schemas": schemas})
    except (ConfigError, TypeError, ValueError) as error:
        connection.sendall(frame(json.dumps({"error": str(error)}).encode()))
        return
    connection.sendall(frame(ready.encode()))
    lock = threading.Lock()

    def send(data: bytes) -> None:
        with lock, contextlib.suppress(OSError):  # the pool is gone, and reading says so
            connection.sendall(frame(data))

    host = EpisodeHost(kinds, send)
    with contextlib.suppress(ConnectionResetError):  # the pool went with answers unread
        while (payload := read_frame(connection)) is not None:
            request = pickle.loads(payload)
            if isinstance(request, Ping):
                send(encode_answer(PONG_EPISODE, StepOutcome()))
            else:
                host.handle(request)
    host.close()
    os._exit(0)  # a thread that hangs would keep the interpreter from ending


def load_kinds(spec: EnvironmentSpec) -> dict[str, EnvironmentKind]:
    """Make every kind. Raises ConfigError that names the kind."""
    return {name: _load_kind(name, kind) for name, kind in spec.kinds.items()}


def _load_kind(name: str, spec: KindSpec) -> EnvironmentKind:
    module, _, attribute = spec.factory.partition(":")
    try:
        factory: Callable[..., EnvironmentKind] = vars(importlib.import_module(module))[attribute]
        return factory(**spec.kwargs)
    except KeyError as error:
        raise ConfigError(f"environment {name!r}: there is no {error} in {spec.factory} (module:name)") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"environment {name!r} ({spec.factory}): {type(error).__name__}: {error}") from error


@final
class _Lane:
    """The calls of one episode, in order, and its environment once it has started."""

    def __init__(self) -> None:
        self.calls: deque[Request] = deque()
        self.busy = False
        self.environment: Environment | None = None
        self.takes_cut = False  # whether its `step` wants to know that a limit ended the turn
        self.failure: str | None = None


@final
class EpisodeHost:
    """Runs requests in threads; `send` takes the bytes of answers, from any thread."""

    def __init__(self, kinds: Mapping[str, EnvironmentKind], send: Callable[[bytes], None]) -> None:
        self._kinds = kinds
        self._send = send
        self._lanes: dict[int, _Lane] = {}
        self._changed = threading.Condition()  # of the lanes
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="episode")

    def handle(self, request: Request) -> None:
        """Queue a request behind the others of its episode; returns at once."""
        with self._changed:
            lane = self._lanes.setdefault(request.episode, _Lane())
            lane.calls.append(request)
            if not lane.busy:
                lane.busy = True
                self._threads.submit(self._run, lane)

    def close(self) -> None:
        """End all environments, then all kinds, as far as they let themselves be ended in a moment."""
        with self._changed:
            left = list(self._lanes)
        for episode in left:
            self.handle(Close(episode))
        with self._changed:
            self._changed.wait_for(lambda: not self._lanes, _CLOSE_SECONDS)
        _all_in_time([lambda kind=kind: _quietly(kind.close) for kind in self._kinds.values()])

    def _run(self, lane: _Lane) -> None:
        """Carry out one call of the lane, and go to the back of the queue for its next one."""
        request = lane.calls.popleft()
        if isinstance(request, Start):
            self._start(lane, request)
            self._send(encode_answer(-request.episode, StepOutcome()))
        elif isinstance(request, Close):
            self._end(lane)
        else:
            self._send(self._step(lane, request))
        with self._changed:
            lane.busy = bool(lane.calls)
            if lane.busy:
                self._threads.submit(self._run, lane)
            elif isinstance(request, Close):
                del self._lanes[request.episode]
                self._changed.notify_all()

    def _start(self, lane: _Lane, request: Start) -> None:
        try:
            lane.environment = self._kinds[request.prompt.env_name or ""].start(request.prompt)
            lane.takes_cut = "cut" in inspect.signature(lane.environment.step).parameters
        except BaseException:  # noqa: BLE001 - the process boundary: environments may raise anything
            lane.failure = f"start raised: {traceback.format_exc()[-_MAX_FAILURE_CHARACTERS:]}"

    @staticmethod
    def _step(lane: _Lane, request: Step | Finish) -> bytes:
        begin, episode = time.perf_counter(), request.episode
        try:
            if lane.environment is None:
                return encode_answer(episode, StepOutcome(failure=lane.failure or "start raised: nothing is known"))
            if isinstance(request, Step):
                act: Callable[..., StepResult] = lane.environment.step
                result = act(request.text, cut=request.cut) if lane.takes_cut else act(request.text)
            else:
                result = StepResult(reward=_final_reward(lane.environment))
            return encode_answer(episode, StepOutcome(result=result, run_seconds=time.perf_counter() - begin))
        except BaseException:  # noqa: BLE001 - the process boundary: a call without an answer would hang its episode
            failure = f"step raised: {traceback.format_exc()[-_MAX_FAILURE_CHARACTERS:]}"
            return encode_answer(episode, StepOutcome(failure=failure, run_seconds=time.perf_counter() - begin))

    @staticmethod
    def _end(lane: _Lane) -> None:
        environment, lane.environment = lane.environment, None
        if environment is not None:
            _quietly(environment.close)


def _final_reward(environment: Environment) -> float:
    return environment.finish() if isinstance(environment, Finishing) else 0.0


def _all_in_time(calls: Sequence[Callable[[], None]]) -> None:
    """Make calls at the same time, and leave behind those that take too long."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _CLOSE_SECONDS
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))


def _quietly(close: Callable[[], None]) -> None:
    try:
        close()
    except BaseException:  # noqa: BLE001 - the episode is over; what its end raises is for the log
        _LOG.exception("closing an environment failed")


if __name__ == "__main__":
    main()
