"""Advantage estimators by name: what they take and give, and how one is registered. Called by the trainer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from vrl.algorithms import segments


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """One batch of finished rows.

    `token_level_rewards` may stand on any token of a row: estimators over row scores add up the whole row, estimators
    over time credit a reward on a token that was not sampled to the last sampled token before it. `values[t]` is the
    value of the prefix before t and is read on sampled tokens only. `group` holds any integer ids; equal ids are one
    group (one draw of a prompt). `reward_baselines` are the scores of the greedy rollouts, per row.
    """

    token_level_rewards: Float[Tensor, " T"]
    mask: Bool[Tensor, " T"]
    group: Int64[Tensor, " B"]
    offsets: Int64[Tensor, " B+1"]
    values: Float[Tensor, " T"] | None = None
    reward_baselines: Float[Tensor, " B"] | None = None

    def __post_init__(self) -> None:
        total = self.token_level_rewards.numel()
        segments.check_offsets(self.offsets, total)
        if self.mask.dtype != torch.bool or self.mask.numel() != total:
            raise ValueError(f"mask must be bool [{total}], got {self.mask.dtype} {list(self.mask.shape)}")
        if self.group.numel() != self.rows:
            raise ValueError(f"group must name one group for each of the {self.rows} rows, got {self.group.numel()}")

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.offsets.numel() - 1

    def scores(self) -> Float[Tensor, " B"]:
        """Sum of each row's token rewards, in float64 so that group statistics do not round."""
        return segments.row_sum(self.token_level_rewards, self.offsets).double()

    def per_token(self, row_values: Float[Tensor, " B"]) -> Float[Tensor, " T"]:
        """Gives every sampled token the value of its row, in the rewards' dtype; 0 elsewhere."""
        rewards = self.token_level_rewards
        return segments.spread(row_values.to(rewards.dtype), self.offsets, rewards.numel()).mul_(self.mask)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageParams:
    """Settings of the estimators; each reads what its formula has. `eps` is added to a standard deviation."""

    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std: bool = True
    eps: float = 1e-6


@final
@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    """Advantages and returns per token, 0 on tokens that were not sampled."""

    advantages: Float[Tensor, " T"]
    returns: Float[Tensor, " T"]


Compute = Callable[[AdvantageInputs, AdvantageParams], AdvantageOutputs]


@final
@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """A registered estimator: what it needs from the run, and the function that computes it (without gradients)."""

    name: str
    compute: Compute
    needs_critic: bool
    needs_reward_baselines: bool

    def __call__(self, inputs: AdvantageInputs, params: AdvantageParams) -> AdvantageOutputs:
        """Raises ValueError when an input that this estimator needs is missing, or rows do not suit it."""
        if self.needs_critic and inputs.values is None:
            raise ValueError(f"adv_estimator={self.name} needs values: give the run a critic")
        if self.needs_reward_baselines and inputs.reward_baselines is None:
            raise ValueError(f"adv_estimator={self.name} needs reward_baselines: score one greedy rollout a prompt")
        with torch.no_grad():
            return self.compute(inputs, params)


_ESTIMATORS: dict[str, AdvantageEstimator] = {}


def register_advantage(
    name: str, *, needs_critic: bool = False, needs_reward_baselines: bool = False
) -> Callable[[Compute], Compute]:
    """Decorator that makes a function available as `adv_estimator=name`. A name taken twice is a ValueError."""

    def register(compute: Compute) -> Compute:
        if name in _ESTIMATORS:
            raise ValueError(f"advantage estimator {name!r} is already registered; choose another name")
        _ESTIMATORS[name] = AdvantageEstimator(name, compute, needs_critic, needs_reward_baselines)
        return compute

    return register


def get_advantage(name: str) -> AdvantageEstimator:
    """The estimator of that name; ValueError with the known names otherwise."""
    if name not in _ESTIMATORS:
        raise ValueError(f"unknown adv_estimator {name!r}; known: {', '.join(known_advantages())}")
    return _ESTIMATORS[name]


def known_advantages() -> tuple[str, ...]:
    """Names of all registered estimators, sorted."""
    return tuple(sorted(_ESTIMATORS))
