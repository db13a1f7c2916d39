"""Estimators of the KL divergence between the policy and the reference, KL in the reward, and its coefficient.

The actor uses `kl_estimate` as a loss, the trainer `kl_in_reward` and a controller. Estimators after Schulman,
"Approximating KL divergence" (2020), in verl's names.
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol, final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from vrl.algorithms import aggregation

# Bounds of k3, as in verl: beyond them its exponential leaves float32, and a single token would rule the loss.
_MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0

_CANONICAL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
KL_ESTIMATORS = tuple(_CANONICAL) + tuple(f"{name}+" for name in _CANONICAL)


def kl_estimate(
    log_probs: Float[Tensor, " T"], ref_log_probs: Float[Tensor, " T"], mask: Bool[Tensor, " T"], estimator: str
) -> Float[Tensor, " T"]:
    """KL per sampled token, 0 elsewhere; masked tokens reach neither value nor gradient. Computed in float32 or better.

    With d = log_probs - ref_log_probs: k1 (kl) d; abs |d|; k2 (mse) d^2 / 2; k3 (low_var_kl) exp(-d) - 1 + d, with d
    held within 20 and the value within 10 (zero gradient beyond). A name ending in + keeps the value and takes k2's
    gradient. Finite for any finite gap; a NaN on a sampled token stays one. Unknown names are a ValueError.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL estimator {estimator!r}; known: {', '.join(KL_ESTIMATORS)}")
    wide = torch.promote_types(log_probs.dtype, torch.float32)
    gap = torch.where(mask, log_probs, 0.0).to(wide) - torch.where(mask, ref_log_probs, 0.0).to(wide)
    value = _value(gap, _CANONICAL[estimator.removesuffix("+")])
    if not estimator.endswith("+"):
        return value
    k2 = _value(gap, "k2")
    return value.detach() + (k2 - k2.detach())


def _value(gap: Float[Tensor, " T"], estimator: str) -> Float[Tensor, " T"]:
    if estimator == "k1":
        return gap
    if estimator == "abs":
        return gap.abs()
    if estimator == "k2":
        return 0.5 * gap.square()
    inverse = (-gap).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return (inverse.exp() - inverse - 1.0).clamp(-_MAX_K3, _MAX_K3)


def kl_in_reward(
    token_level_scores: Float[Tensor, " T"], kl: Float[Tensor, " T"], mask: Bool[Tensor, " T"], beta: float
) -> Float[Tensor, " T"]:
    """token_level_rewards: scores minus beta times `kl` (from `kl_estimate` of the old policy) on sampled tokens."""
    return token_level_scores - beta * torch.where(mask, kl, 0.0)


def sequence_mean_kl(kl: Float[Tensor, " T"], mask: Bool[Tensor, " T"], offsets: Int64[Tensor, " B1"]) -> float:
    """Mean over rows of their token mean, for the adaptive controller; rows without a sampled token are left out."""
    counts = aggregation.counts(mask, offsets)
    return float(aggregation.aggregate(kl.detach(), mask, offsets, "seq-mean-token-mean", counts))


class KlController(Protocol):
    """The coefficient of KL in the reward. A value: the state to save is the object itself."""

    @property
    def beta(self) -> float:
        """The coefficient of this step."""
        ...

    def updated(self, current_kl: float, n_steps: int, /) -> "KlController":
        """The controller of the next step, after a step with `n_steps` rows whose mean KL was `current_kl`."""
        ...


@final
@dataclass(frozen=True, slots=True)
class FixedKl:
    """A coefficient that stays."""

    beta: float

    def updated(self, _current_kl: float, _n_steps: int, /) -> "FixedKl":
        """Itself."""
        return self


@final
@dataclass(frozen=True, slots=True)
class AdaptiveKl:
    """A coefficient that follows a target (Ziegler et al., arXiv 1909.08593). `horizon` counts rows."""

    beta: float
    target_kl: float
    horizon: int

    def __post_init__(self) -> None:
        if self.target_kl <= 0 or self.horizon <= 0:
            raise ValueError(
                "adaptive KL needs kl_ctrl.target_kl > 0 and kl_ctrl.horizon > 0, "
                f"got {self.target_kl} and {self.horizon}"
            )

    def updated(self, current_kl: float, n_steps: int, /) -> "AdaptiveKl":
        """beta *= 1 + clip(kl / target - 1, -0.2, 0.2) n_steps / horizon; a KL that is not finite changes nothing."""
        if not math.isfinite(current_kl):
            return self
        error = min(max(current_kl / self.target_kl - 1.0, -0.2), 0.2)
        return replace(self, beta=self.beta * (1.0 + error * n_steps / self.horizon))
