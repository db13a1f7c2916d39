"""Episodes that failed outside the model: which are tried again, after what pause, and which are given up. Torch-free.

A failure costs a try and a pause that grows, so that a service has time to come back. An episode whose tool process was
brought down by another's call pays nothing, and starts anew at once with the same seeds.
"""

import logging
import time
from dataclasses import dataclass, replace
from typing import Final, final

from vrl.protocol.trajectory import Prompt

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 30.0
_FEW_CALLS: Final = 8  # under way together, when one of many may have ended a process; after that 1
_MAX_LOGGED_CHARACTERS: Final = 4000


@final
@dataclass(frozen=True, slots=True)
class Start:
    """An episode that is to start: a sample of a prompt, and which try it is."""

    prompt: Prompt
    index: int
    retry: int = 0  # tries that its own failures have cost
    reruns: int = 0  # starts that others' failures have cost
    most_calls: int | None = None  # that may run together with its own, once one of them may have ended a process
    due: float = 0.0  # time.monotonic()

    @property
    def name(self) -> str:
        """Name of the episode, unique in a run."""
        return f"{self.prompt.uid}/{self.index}"


@final
class Retries:
    """The episodes of one step that wait for their next try."""

    def __init__(self, most: int) -> None:
        """Allow an episode `most` tries after its first."""
        self._most = most
        self.ready: list[Start] = []
        self.resting: dict[str, Start] = {}

    def __bool__(self) -> bool:
        return bool(self.ready or self.resting)

    def again(self, start: Start, failure: str, *, charged: bool = True, suspect: bool = False) -> bool:
        """Plan the next try of an episode; return False when it has none left.

        Args:
            start: the try that failed.
            failure: why, with its traceback.
            charged: whether it costs a try. One that costs none is due at once.
            suspect: whether a call of it may have brought its process down; surely so, when it is charged as well.
        """
        most_calls = start.most_calls
        if suspect:
            most_calls = _FEW_CALLS if most_calls is None and not charged else 1
        if not charged:
            self.ready.append(replace(start, reruns=start.reruns + 1, most_calls=most_calls))
            return True
        if start.retry >= self._most:
            return False
        pause = min(_FIRST_PAUSE_SECONDS * 2**start.retry, _LONGEST_PAUSE_SECONDS)
        _LOG.warning(
            "row %s, sample %d: try %d of %d failed, the next begins in %g s: %s",
            start.prompt.row_id,
            start.index,
            start.retry + 1,
            self._most + 1,
            pause,
            failure[-_MAX_LOGGED_CHARACTERS:],
        )
        due = time.monotonic() + pause
        self.resting[start.name] = replace(start, retry=start.retry + 1, most_calls=most_calls, due=due)
        return True

    def rested(self, name: str) -> None:
        """Make an episode whose pause is over ready to start."""
        self.ready.append(self.resting.pop(name))
