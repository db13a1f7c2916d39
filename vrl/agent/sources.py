"""Where the turn loop takes prompts from and puts finished rows, within one process. Torch-free."""

from collections.abc import Callable, Sequence
from typing import final

from vrl.protocol.ports import PromptSource
from vrl.protocol.trajectory import Prompt, Trajectory


@final
class FixedSource:
    """Prompts that belong to one replica, in order."""

    def __init__(self, episodes: Sequence[tuple[Prompt, int]]) -> None:
        self._left = list(reversed(episodes))

    def take(self, k: int) -> list[tuple[Prompt, int]]:
        """Return the next `k` episodes, or those that are left."""
        return [self._left.pop() for _ in range(min(k, len(self._left)))]


@final
class TrajectoryList:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []

    def put(self, trajectories: Sequence[Trajectory]) -> None:
        """Append; the list is in the order in which episodes were scored."""
        self.trajectories.extend(trajectories)


@final
class LockStepSource:
    """What all tensor-parallel ranks of an engine take from: the leader takes, the others are told.

    `share` sends the leader's list to its peers and returns it on each of them.
    """

    def __init__(
        self, source: PromptSource | None, share: Callable[[list[tuple[Prompt, int]] | None], list[tuple[Prompt, int]]]
    ) -> None:
        self._source = source
        self._share = share

    def take(self, k: int) -> list[tuple[Prompt, int]]:
        """Return what the leader took, the same on all ranks of the engine. A collective: all of them call it."""
        return self._share(self._source.take(k) if self._source is not None else None)
