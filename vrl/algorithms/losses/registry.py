"""Policy losses by name: what they take and give, how one is registered. The actor calls one for each micro-batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch: `log_probs` carry the gradient, all else is data. Anything may stand on masked tokens.

    `rollout_is_weights` multiply the loss of each token (importance weights between the engine and the trainer).
    """

    log_probs: Float[Tensor, " T"]
    old_log_probs: Float[Tensor, " T"]
    advantages: Float[Tensor, " T"]
    mask: Bool[Tensor, " T"]
    offsets: Int64[Tensor, " B1"]
    rollout_is_weights: Float[Tensor, " T"] | None = None

    def __post_init__(self) -> None:
        if self.mask.dtype != torch.bool:
            raise ValueError(f"mask must be bool, got {self.mask.dtype}")
        shapes = {tuple(x.shape) for x in (self.log_probs, self.old_log_probs, self.advantages, self.mask)}
        if len(shapes) > 1:
            raise ValueError(f"log_probs, old_log_probs, advantages and mask must have one shape, got {sorted(shapes)}")

    def without_masked(self) -> "LossInputs":
        """The same with 0 on masked tokens, so that what stood there reaches neither value nor gradient."""
        weights = self.rollout_is_weights
        return replace(
            self,
            log_probs=torch.where(self.mask, self.log_probs, 0.0),
            old_log_probs=torch.where(self.mask, self.old_log_probs, 0.0),
            advantages=torch.where(self.mask, self.advantages, 0.0),
            rollout_is_weights=None if weights is None else torch.where(self.mask, weights, 1.0),
        )

    def weighted(self, per_token: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Times the importance weights, where there are any."""
        return per_token if self.rollout_is_weights is None else per_token * self.rollout_is_weights


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossParams:
    """Settings of the losses in verl's names; each reads what its formula has."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        if self.clip_ratio_c <= 1.0:
            raise ValueError(
                f"actor.clip_ratio_c must be above 1, got {self.clip_ratio_c}: the dual clip bounds the loss of "
                "negative advantages from ratio c on; 3.0 is usual"
            )
        if self.clip_ratio_low < 0 or self.clip_ratio_high < 0:
            raise ValueError(
                "actor.clip_ratio_low and clip_ratio_high must not be negative, "
                f"got {self.clip_ratio_low} and {self.clip_ratio_high}"
            )
        if self.tau_pos <= 0 or self.tau_neg <= 0:
            raise ValueError(f"actor.tau_pos and tau_neg must be positive, got {self.tau_pos} and {self.tau_neg}")


@final
@dataclass(frozen=True, slots=True)
class LossOutputs:
    """Loss per token, and metrics per token: `aggregation` sums and divides both."""

    per_token: Float[Tensor, " T"]
    metrics: Mapping[str, Float[Tensor, " T"]]


Compute = Callable[[LossInputs, LossParams], LossOutputs]


@final
@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A registered loss. `aggregation` is the mode its paper fixes; None leaves the choice to `actor.loss_agg_mode`."""

    name: str
    compute: Compute
    aggregation: str | None

    def __call__(self, inputs: LossInputs, params: LossParams) -> LossOutputs:
        """Loss and metrics per token, both 0 on masked tokens."""
        return self.compute(inputs.without_masked(), params)


_LOSSES: dict[str, PolicyLoss] = {}


def register_policy_loss(name: str, *, aggregation: str | None = None) -> Callable[[Compute], Compute]:
    """Decorator that makes a function available as `actor.policy_loss.loss_mode=name`.

    It is called with 0 on masked tokens. A name taken twice is a ValueError.
    """

    def register(compute: Compute) -> Compute:
        if name in _LOSSES:
            raise ValueError(f"policy loss {name!r} is already registered; choose another name")
        _LOSSES[name] = PolicyLoss(name, compute, aggregation)
        return compute

    return register


def get_policy_loss(name: str) -> PolicyLoss:
    """The loss of that name; ValueError with the known names otherwise."""
    if name not in _LOSSES:
        raise ValueError(f"unknown policy loss {name!r}; known: {', '.join(known_policy_losses())}")
    return _LOSSES[name]


def known_policy_losses() -> tuple[str, ...]:
    """Names of all registered losses, sorted."""
    return tuple(sorted(_LOSSES))
