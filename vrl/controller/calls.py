"""Waits for calls on worker processes: results in order; the first failure, or the death of any process, ends the wait.

driver --call--> processes of one pool            results are taken as they come
       --ping--> idle processes of all others     every few seconds, so that a death there is found, too
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from vrl.protocol.errors import ConfigError, DataError, WorkerError

_POLL_SECONDS = 5.0
_DEATH_SECONDS = 3.0  # how long after a failed call another rank's death may become known


@final
@dataclass(frozen=True, slots=True)
class Place:
    """A process of a run: its pool and its rank there."""

    pool: str
    rank: int


@final
class Calls:
    """The calls of a run on its processes."""

    def __init__(self) -> None:
        self._processes: dict[Place, ActorHandle] = {}
        self._pings: dict[Any, Place] = {}

    def watch(self, place: Place, process: ActorHandle) -> None:
        """From now on the death of this process ends whatever wait is under way."""
        self._processes[place] = process

    def results(self, calls: Sequence[tuple[Place, Any]], what: str) -> list[Any]:
        """Return all results in the order of the calls; the first failure ends the wait at once.

        The other ranks may then stand in a collective for good, so a failed call means the end of the run.

        Raises:
            WorkerError: a call failed or a process died, with its pool and rank.
            ConfigError, DataError: as raised by the process.
        """
        place = {ref: where for where, ref in calls}
        found: dict[Any, Any] = {}
        pending = list(place)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=_POLL_SECONDS)
            for ref in done:
                try:
                    found[ref] = ray.get(ref)
                except (RayTaskError, RayActorError) as error:
                    raise _failure(error, place[ref], {ref: place[ref] for ref in pending}, what) from error
            if not done:
                self._look_at_others({place[ref] for ref in pending}, what)
        return [found[ref] for _, ref in calls]

    def _look_at_others(self, busy: set[Place], what: str) -> None:
        """Raise WorkerError when a process that nobody waits for has died."""
        asked = busy | set(self._pings.values())
        for place, process in self._processes.items():
            if place not in asked:
                self._pings[process.ping.remote()] = place
        answered, _ = ray.wait(list(self._pings), num_returns=len(self._pings), timeout=0) if self._pings else ([], [])
        for ref in answered:
            place = self._pings.pop(ref)
            try:
                ray.get(ref)
            except RayActorError as error:
                raise _died(error, place, what) from error


def _failure(error: RayTaskError | RayActorError, place: Place, pending: Mapping[Any, Place], what: str) -> Exception:
    """Return the error to raise. A dead process breaks its peers' collectives, and their complaints may come first."""
    if isinstance(error, RayActorError):
        return _died(error, place, what)
    late = ray.wait(list(pending), num_returns=len(pending), timeout=_DEATH_SECONDS)[0] if pending else []
    for ref in late:
        try:
            ray.get(ref)
        except RayActorError as death:
            return _died(death, pending[ref], what)
        except RayTaskError:
            continue
    if isinstance(error.cause, ConfigError | DataError):
        return error.cause
    cause = f"{type(error.cause).__name__}: {error.cause}"
    return WorkerError(f"{what} failed on rank {place.rank} of pool {place.pool}: {cause}\n{error}")


def _died(error: RayActorError, place: Place, what: str) -> WorkerError:
    return WorkerError(
        f"{what}: in pool {place.pool} the process of rank {place.rank} died (killed, or out of memory: see `dmesg` "
        f"and the worker log): {error}"
    )
