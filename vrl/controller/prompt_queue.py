"""Where replicas get their episodes: one queue in a Ray actor for all, or a fixed share for each."""

from collections import deque
from collections.abc import Sequence
from typing import Any, final

import ray

from vrl.agent.sources import FixedSource
from vrl.protocol.ports import PromptSource
from vrl.protocol.trajectory import Prompt

Episode = tuple[Prompt, int]


@final
class PromptQueue:
    """Episodes in order; lives in a process of its own.

    At first every replica takes an even share, as far as it has room: what can start at once does. What is left then
    goes in shares that get smaller towards the end, so that all end together.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._left: deque[Episode] = deque()
        self._first_takes = 0

    def fill(self, episodes: Sequence[Episode]) -> None:
        """Start a step with these episodes; whatever was left is dropped."""
        self._left = deque(episodes)
        self._first_takes = self._replicas

    def take(self, k: int) -> list[Episode]:
        """Return at most `k` episodes: a fair share, later one of half of what is left; in whole groups if possible."""
        share = -(-len(self._left) // (self._first_takes or 2 * self._replicas))
        self._first_takes = max(self._first_takes - 1, 0)
        count = min(k, max(share, 1), len(self._left))
        # Samples of one prompt stay together where they fit: the engine reads their prompt once.
        while count < min(k, len(self._left)) and self._left[count][0].uid == self._left[count - 1][0].uid:
            count += 1
        return [self._left.popleft() for _ in range(count)]


@final
class QueueSource:
    """A replica's end of the shared queue."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def take(self, k: int) -> list[Episode]:
        """Return at most `k` episodes; empty when the queue is."""
        return ray.get(self._queue.take.remote(k))


def start_queue(replicas: int) -> Any:
    """Start the queue's process."""
    return ray.remote(PromptQueue).options(num_cpus=0).remote(replicas)


def shared_sources(queue: Any, episodes: Sequence[Episode], replicas: int) -> list[PromptSource]:
    """All replicas pull from one queue, so that a long episode holds up nobody."""
    ray.get(queue.fill.remote(list(episodes)))
    return [QueueSource(queue)] * replicas


def fixed_sources(episodes: Sequence[Episode], replicas: int) -> list[PromptSource]:
    """Every replica has its prompts beforehand, dealt in turn by prompt: timing cannot change who samples what."""
    uids = list(dict.fromkeys(prompt.uid for prompt, _ in episodes))
    owner = {uid: number % replicas for number, uid in enumerate(uids)}
    shares: list[list[Episode]] = [[] for _ in range(replicas)]
    for episode in episodes:
        shares[owner[episode[0].uid]].append(episode)
    return [FixedSource(share) for share in shares]
