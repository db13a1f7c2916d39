"""The roles as the training loop sees them: verbs on batches. A role that a run does not need is a null object."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
import torch

from vrl.controller.prompt_queue import Episode, fixed_sources, shared_sources
from vrl.controller.worker_group import WorkerGroup
from vrl.protocol.columns import SAMPLE_INDEX, STOP_REASON, UID
from vrl.protocol.dataproto import DataProto, concat
from vrl.protocol.trajectory import Prompt, Sampling, StopReason
from vrl.workers.host import Colocated

_LOG = logging.getLogger(__name__)

NOTHING = DataProto()


class LogProbs(Protocol):
    """Adds log-probs of some policy."""

    def log_probs(self, batch: DataProto) -> DataProto:
        """Return the new columns for the rows of `batch`, in their order; no column at all when nobody needs them."""
        ...


class Values(Protocol):
    """Adds values, and learns them."""

    def values(self, batch: DataProto) -> DataProto:
        """Return the value of the prefix before each token; no column at all when nobody needs it."""
        ...

    def update(self, batch: DataProto) -> Callable[[], dict[str, float]]:
        """Learn the returns, one optimizer step a mini-batch of column `mini_batch`.

        Return what waits for the end and gives the metrics: on processes of its own a critic learns beside the actor.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizer into a new folder."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote."""
        ...

    def export(self, folder: Path) -> None:
        """Write a folder that can be another run's `critic.model.path`."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Generated:
    """The rows of a step: those to train on, in the order of prompts and samples, those that failed, and the rest."""

    rows: DataProto
    failed: DataProto
    policy_version: int
    timing: dict[str, float]
    dropped: DataProto = NOTHING  # sampled and scored, but left out of training
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class Scores(Protocol):
    """Adds scores that the rollout could not give by itself."""

    def score(self, generated: Generated) -> Generated:
        """Return what was generated, with the scores of its rows completed."""
        ...


@final
class Rollout:
    """All replicas together."""

    def __init__(self, group: WorkerGroup, replicas: int, queue: Any | None, sleeps: bool) -> None:
        self._group = group
        self._replicas = replicas
        self._queue = queue  # None: every replica gets a fixed share
        self._sleeps = sleeps

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> Generated:
        """Return `sampling.n` rows a prompt."""
        episodes: list[Episode] = [(prompt, index) for prompt in prompts for index in range(sampling.n)]
        if self._queue is None:
            sources = fixed_sources(episodes, self._replicas)
        else:
            sources = shared_sources(self._queue, episodes, self._replicas)
        parts = [part for part in self._group.call("generate", sources, sampling, step) if part is not None]
        return _in_order(concat(parts), prompts)

    def sleep(self) -> None:
        """Give the engines' memory to the learners; nothing can be generated before the next weight sync."""
        if self._sleeps:
            self._group.call("sleep")


def _in_order(rows: DataProto, prompts: Sequence[Prompt]) -> Generated:
    place = {prompt.uid: number for number, prompt in enumerate(prompts)}
    number = np.array([place[uid] for uid in rows.objects[UID]], dtype=np.int64)
    order = np.lexsort((rows.dense(SAMPLE_INDEX).numpy(), number))
    rows = rows.rows(order)
    failed = torch.tensor([reason == StopReason.FAILED for reason in rows.objects[STOP_REASON]], dtype=torch.bool)
    timing = stage_seconds(rows)
    version = rows.meta.policy_version
    rows = replace(rows, meta=replace(rows.meta, timing={}))
    return Generated(rows.rows(~failed), rows.rows(failed), version, timing)


def stage_seconds(rows: DataProto) -> dict[str, float]:
    """Return what workers reported of their stages, as `timing_s/*`."""
    return {f"timing_s/{name}": seconds for name, seconds in rows.meta.timing.items()}


@final
class Actor:
    """The policy that learns."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def log_probs(self, batch: DataProto) -> DataProto:
        """Return log-probs and entropy of the sampled tokens under the present weights."""
        return self._group.call("log_probs", batch)

    def update(self, batch: DataProto) -> dict[str, float]:
        """Take one optimizer step a mini-batch of column `mini_batch`; return metrics."""
        return self._group.call("update", batch)

    def update_supervised(self, batch: DataProto) -> dict[str, float]:
        """Like `update`, on the cross-entropy of the tokens in `loss_mask`."""
        return self._group.call("update_supervised", batch)

    def sync_weights_to(self, rollout: WorkerGroup, version: int) -> None:
        """Reshard the present weights into the engines, as policy `version`."""
        rollout.call("sync_weights", Colocated(self._group.role), version)

    def save(self, folder: Path) -> None:
        """Write weights and optimizer into a new folder."""
        self._group.call("save", folder)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote; the engines need a sync afterwards."""
        _load(self._group, folder)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder that others can load."""
        self._group.call("export", folder)


@final
class Reference:
    """The frozen policy."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def log_probs(self, batch: DataProto) -> DataProto:
        """Return the log-probs of the sampled tokens under the frozen weights."""
        return self._group.call("log_probs", batch)


@final
class BaseAsReference:
    """The actor without its adapter: the frozen policy of a run with LoRA, which takes no weights of its own."""

    def __init__(self, actor: WorkerGroup) -> None:
        self._actor = actor

    def log_probs(self, batch: DataProto) -> DataProto:
        """Return the log-probs of the sampled tokens under the frozen weights."""
        return self._actor.call("base_log_probs", batch)


@final
class Critic:
    """The value model. With `beside` it has processes of its own, and the caller need not wait for its update."""

    def __init__(self, group: WorkerGroup, beside: bool = False) -> None:
        self._group = group
        self._beside = beside

    def values(self, batch: DataProto) -> DataProto:
        """Return the value of the prefix before each token."""
        return self._group.call("values", batch)

    def update(self, batch: DataProto) -> Callable[[], dict[str, float]]:
        """Take one optimizer step a mini-batch of column `mini_batch`; return what gives the metrics."""
        wait = self._group.start("update", batch)
        if self._beside:
            return wait
        metrics = wait()
        return lambda: metrics

    def save(self, folder: Path) -> None:
        """Write weights and optimizer into a new folder."""
        self._group.call("save", folder)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote."""
        _load(self._group, folder)

    def export(self, folder: Path) -> None:
        """Write a folder that can be another run's `critic.model.path`."""
        self._group.call("export", folder)


def _load(group: WorkerGroup, folder: Path) -> None:
    changes = group.call("load", folder)[0]  # all ranks say the same
    if changes:
        _LOG.info("%s.optim: %s", group.role, changes)


@final
class NoLogProbs:
    """Where nobody needs them: no reference, or old log-probs that come from the single update's own forward pass."""

    def log_probs(self, batch: DataProto) -> DataProto:  # noqa: ARG002  (part of the interface)
        """Return no column."""
        return NOTHING


@final
class NoCritic:
    """For estimators without values."""

    def values(self, batch: DataProto) -> DataProto:  # noqa: ARG002  (part of the interface)
        """Return no column."""
        return NOTHING

    def update(self, batch: DataProto) -> Callable[[], dict[str, float]]:  # noqa: ARG002  (part of the interface)
        """Give no metrics: nothing learns."""
        return dict

    def save(self, folder: Path) -> None:
        """Write nothing; the checkpoint has no folder for a critic."""

    def load(self, folder: Path) -> None:
        """Read nothing, also where a checkpoint has a critic."""

    def export(self, folder: Path) -> None:
        """Write nothing."""


@final
class NoRewardModel:
    """Scores come from the reward processes while episodes run; nothing is left to do."""

    def score(self, generated: Generated) -> Generated:
        """Return what was generated, as it is."""
        return generated
