"""One worker process: the roles that live in it, built in order and called by name.

A plain class: the controller makes it a Ray actor, tests run it under torchrun.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from vrl.models.renderer import load_renderer
from vrl.protocol.config.schema import Config
from vrl.workers import process
from vrl.workers.actor import ActorWorker, ReferenceWorker
from vrl.workers.building import BuildContext
from vrl.workers.critic import CriticWorker
from vrl.workers.process import RankPlace
from vrl.workers.reward_model import RewardModelWorker
from vrl.workers.rollout import RolloutWorker

ROLE_CLASSES: dict[str, type] = {
    "actor": ActorWorker,
    "reference": ReferenceWorker,
    "critic": CriticWorker,
    "reward_model": RewardModelWorker,
    "rollout": RolloutWorker,
}

_IMAGE_CACHE_BYTES = 2**30  # patches of a step's images, decoded once a process


@final
@dataclass(frozen=True, slots=True)
class Colocated:
    """Stands for another role of the same process in a call's arguments."""

    role: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """Optimizer steps of the whole run, by role; schedules need them."""

    actor: int
    critic: int


@final
class WorkerHost:
    """Holds the roles of one rank."""

    def __init__(self, place: RankPlace, config: Config) -> None:
        process.start(place)
        torch.manual_seed(config.trainer.seed)
        model = config.actor_rollout_ref.model
        renderer = load_renderer(config.tokenizer_path, min_pixels=model.min_pixels, max_pixels=model.max_pixels)
        device = (
            torch.device(place.device, torch.cuda.current_device()) if place.device == "cuda" else torch.device("cpu")
        )
        images = renderer.image_cache(_IMAGE_CACHE_BYTES)
        self._context = BuildContext(config=config, device=device, renderer=renderer, images=images)
        self._roles: dict[str, Any] = {}

    def build(self, roles: Sequence[str], length: RunLength, config: Config) -> None:
        """Build roles in the given order; the rollout comes last, when the others have their memory.

        A role that is there already is replaced, by one with these settings. Tokenizer and images
        must be those that the process was started with.
        """
        self._context = replace(self._context, config=config)
        makers: dict[str, Callable[[], Any]] = {
            "actor": lambda: ActorWorker.build(self._context, length.actor),
            "reference": lambda: ReferenceWorker.build(self._context),
            "critic": lambda: CriticWorker.build(self._context, length.critic),
            "reward_model": lambda: RewardModelWorker.build(self._context),
            "rollout": lambda: RolloutWorker.build(self._context),
        }
        for role in roles:
            self._roles[role] = makers[role]()

    def call(self, role: str, method: str, *arguments: Any) -> Any:
        """Call a role's method; `Colocated` arguments become the role of this process."""
        resolved = [self._roles[a.role] if isinstance(a, Colocated) else a for a in arguments]
        return getattr(self._roles[role], method)(*resolved)

    def ping(self) -> None:
        """Answer: a process that has died cannot."""

    def close(self) -> None:
        """End helper processes and the engine, then leave the process group: in this order."""
        rollout = self._roles.get("rollout")
        if rollout is not None:
            rollout.close()
        process.stop()
