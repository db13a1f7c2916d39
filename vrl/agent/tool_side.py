"""Where turns of episodes with an environment go: a pool of tool processes, and word of it to an engine's other ranks.

The turn loop asks once a turn of its own what has happened. With tensor parallelism only the leader has a pool and a
clock; it tells its peers, so that all ranks give their engine the same requests in the same order.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from vrl.agent.environments.pool import EnvironmentPool, PendingStep, Schemas
from vrl.agent.environments.wire import StepOutcome
from vrl.agent.episode import Episode
from vrl.agent.retries import Start
from vrl.protocol.errors import DataError
from vrl.protocol.trajectory import Prompt, StopReason

_LOG = logging.getLogger(__name__)
_WAIT_SECONDS = 0.05  # at a time, when no episode decodes: rewards are to be taken in meanwhile


@final
@dataclass(frozen=True, slots=True)
class Event:
    """A step is done, or (no outcome) an episode's wall-clock limit or the pause before its next try is over."""

    name: str
    outcome: StepOutcome | None


@final
@dataclass(slots=True, eq=False, kw_only=True)
class Running:
    """An episode under way: its row, and where it is now."""

    start: Start
    episode: Episode
    deadline: float  # time.monotonic()
    environment: int | None  # number in the pool; None for a plain row
    request_id: str | None = None  # while it decodes
    ended_by: StopReason = StopReason.ANSWER  # how its last turn ended: by itself, or by a limit
    ending: StopReason | None = None  # why it ends, while its environment is asked for the reward of the whole
    pending: PendingStep | None = None  # while its environment works, on the rank that has the pool

    @property
    def name(self) -> str:
        """Name of the episode, unique in a run."""
        return self.start.name


@final
class ToolSide:
    """The environments as one rank of an engine sees them."""

    def __init__(
        self,
        pool: EnvironmentPool | None = None,
        schemas: Schemas | None = None,
        share: Callable[[list[Event] | None], list[Event]] | None = None,
        in_order: bool = False,
        leads: bool = True,
    ) -> None:
        """Make the side of a rank.

        Args:
            pool: the tool processes; None on ranks that follow, and where no environment is configured.
            schemas: function schemas by kind, the same on all ranks of the engine.
            share: sends the leader's events to its peers and returns them on each; None for an engine of one rank.
            leads: whether the pauses of episodes that are tried again are counted here: one rank of an engine does.
            in_order: wait for every result before anything decodes on, so that timing cannot change what is sampled.
        """
        self._pool = pool
        self._schemas = schemas or {}
        self._share = share
        self._in_order = in_order
        self._leads = leads

    def schemas_of(self, prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        """Return the function schemas that a row's prompt shows. Raises DataError for an unknown environment."""
        if prompt.env_name is None:
            return ()
        if prompt.env_name not in self._schemas:
            known = ", ".join(sorted(self._schemas)) or "none"
            raise DataError(
                f"row {prompt.row_id}: env_name '{prompt.env_name}' is unknown, there are: {known}; name it in "
                "rollout.agent.environments, or leave the cell empty for a plain row"
            )
        return self._schemas[prompt.env_name]

    def start(self, prompt: Prompt, most_calls: int | None = None) -> int | None:
        """Start the environment of a row that has one; see `EnvironmentPool.start`."""
        if prompt.env_name is None:
            return None
        return self._pool.start(prompt, most_calls) if self._pool is not None else 0

    def step(self, running: Running, text: str, cut: bool) -> None:
        """Give a turn to its environment."""
        if self._pool is not None and running.environment is not None:
            running.pending = self._pool.step(running.environment, text, cut)

    def finish(self, running: Running) -> None:
        """Ask an environment for the reward of the whole episode."""
        if self._pool is not None and running.environment is not None:
            running.pending = self._pool.finish(running.environment)

    def close(self, running: Running) -> None:
        """Give back the environment of an episode that is over."""
        running.pending = None
        if self._pool is not None and running.environment is not None:
            self._pool.close_episode(running.environment)

    def events(self, running: Collection[Running], resting: Collection[Start], decoding: bool) -> list[Event]:
        """Return what has happened, in the order of the episodes; waits a moment when nothing decodes.

        `resting` are episodes that wait for their next try. A collective on ranks that share an engine, which must all
        call it for the same episodes.
        """
        found = None
        if self._leads:
            found = self._collect(running, decoding)
            if self._in_order and resting:
                time.sleep(max(0.0, *(start.due - time.monotonic() for start in resting)))
            found += [Event(start.name, None) for start in resting if time.monotonic() >= start.due]
        if self._share is not None:
            return self._share(found)
        return found or []

    def _collect(self, running: Collection[Running], decoding: bool) -> list[Event]:
        waits = not decoding and not any(entry.pending is not None and entry.pending.done() for entry in running)
        if self._pool is None:
            time.sleep(_WAIT_SECONDS if waits else 0.0)
        else:
            self._pool.poll(_WAIT_SECONDS if waits else 0.0)
            while self._in_order and any(_is_under_way(entry) for entry in running):
                self._pool.poll(_WAIT_SECONDS)
        now = time.monotonic()
        events: list[Event] = []
        for entry in running:
            if entry.pending is not None and entry.pending.done():
                events.append(Event(entry.name, entry.pending.outcome))
                entry.deadline = _deadline(entry)
                entry.pending = None
            elif now > _deadline(entry):
                events.append(Event(entry.name, None))
        if self._in_order and any(event.outcome is None for event in events):
            _LOG.warning("an episode ran over its wall-clock limit: this step cannot be repeated exactly")
        return events


def _is_under_way(entry: Running) -> bool:
    return entry.pending is not None and not entry.pending.done() and time.monotonic() <= _deadline(entry)


def _deadline(entry: Running) -> float:
    """Return when the time of an episode is over; what a call is held back for others' sake does not count."""
    return entry.deadline + (entry.pending.held_seconds if entry.pending is not None else 0.0)
