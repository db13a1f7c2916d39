"""Advantage estimators by name: what they take and give, and how one is registered. Called by the trainer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int, Int64
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

    `turn_ids` is k on the sampled tokens of turn k. `state_ids` numbers the environment state that the token's turn
    answers: equal numbers in one group are the same state. `reward_components` are the parts of each row's score,
    before any weighting. `old_log_probs` are of the sampled tokens, `sum_pi_squared` is the sum over the vocabulary of
    the squared probabilities at each of them, `rollout_is_weights` the importance weights of rollout correction. All
    of these per token are read on sampled tokens only.
    """

    token_level_rewards: Float[Tensor, " T"]
    mask: Bool[Tensor, " T"]
    group: Int64[Tensor, " B"]
    offsets: Int64[Tensor, " B+1"]
    values: Float[Tensor, " T"] | None = None
    reward_baselines: Float[Tensor, " B"] | None = None
    turn_ids: Int[Tensor, " T"] | None = None
    state_ids: Int[Tensor, " T"] | None = None
    reward_components: Float[Tensor, "B C"] | None = None
    old_log_probs: Float[Tensor, " T"] | None = None
    sum_pi_squared: Float[Tensor, " T"] | None = None
    rollout_is_weights: Float[Tensor, " T"] | None = None

    def __post_init__(self) -> None:
        total = self.token_level_rewards.numel()
        segments.check_offsets(self.offsets, total)
        if self.mask.dtype != torch.bool or self.mask.numel() != total:
            raise ValueError(f"mask must be bool [{total}], got {self.mask.dtype} {list(self.mask.shape)}")
        if self.group.numel() != self.rows:
            raise ValueError(f"group must name one group for each of the {self.rows} rows, got {self.group.numel()}")
        for name, column, length in (
            ("values", self.values, total),
            ("reward_baselines", self.reward_baselines, self.rows),
            ("turn_ids", self.turn_ids, total),
            ("state_ids", self.state_ids, total),
            ("reward_components", self.reward_components, self.rows),
            ("old_log_probs", self.old_log_probs, total),
            ("sum_pi_squared", self.sum_pi_squared, total),
            ("rollout_is_weights", self.rollout_is_weights, total),
        ):
            if column is not None and column.shape[0] != length:
                raise ValueError(f"{name} must have {length} entries, got {list(column.shape)}")

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.offsets.numel() - 1

    def scores(self) -> Float[Tensor, " B"]:
        """Sum of each row's token rewards, in float64 so that group statistics do not round."""
        return segments.row_totals(self.token_level_rewards, self.offsets)

    def per_token(self, row_values: Float[Tensor, " B"]) -> Float[Tensor, " T"]:
        """Gives every sampled token the value of its row, in the rewards' dtype; 0 elsewhere."""
        return segments.spread_sampled(row_values.to(self.token_level_rewards.dtype), self.mask, self.offsets)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageParams:
    """Settings of the estimators; each reads what its formula has. `eps` is added to a standard deviation.

    `high_level_gamma` discounts from turn to turn (bi_level_gae), `step_advantage_w` weighs the advantage over equal
    states (gigpo), `component_weights` the parts of the score (gdpo; None: all 1), and `over_all_turns` compares a turn
    with all turns of its group instead of those of its index (grpo_turn).
    """

    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std: bool = True
    eps: float = 1e-6
    high_level_gamma: float = 0.95
    step_advantage_w: float = 1.0
    component_weights: tuple[float, ...] | None = None
    over_all_turns: bool = False


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
    needs_turn_ids: bool
    needs_state_ids: bool
    needs_reward_components: bool
    needs_sum_pi_squared: bool

    def __call__(self, inputs: AdvantageInputs, params: AdvantageParams) -> AdvantageOutputs:
        """Raises ValueError when an input that this estimator needs is missing, or rows do not suit it."""
        probabilities = None if inputs.old_log_probs is None else inputs.sum_pi_squared
        for needed, given, remedy in (
            (self.needs_critic, inputs.values, "values: give the run a critic"),
            (
                self.needs_reward_baselines,
                inputs.reward_baselines,
                "reward_baselines: score one greedy rollout a prompt",
            ),
            (self.needs_turn_ids, inputs.turn_ids, "turn_ids: give it the turn of each sampled token"),
            (self.needs_state_ids, inputs.state_ids, "state_ids: number the environment states that the turns answer"),
            (
                self.needs_reward_components,
                inputs.reward_components,
                "reward_components: let the reward return its parts and name them in algorithm.gdpo_reward_keys",
            ),
            (
                self.needs_sum_pi_squared,
                probabilities,
                "old_log_probs and sum_pi_squared: let the actor return them before advantages are taken",
            ),
        ):
            if needed and given is None:
                raise ValueError(f"adv_estimator={self.name} needs {remedy}")
        with torch.no_grad():
            return self.compute(inputs, params)


_ESTIMATORS: dict[str, AdvantageEstimator] = {}


def register_advantage(
    name: str,
    *,
    needs_critic: bool = False,
    needs_reward_baselines: bool = False,
    needs_turn_ids: bool = False,
    needs_state_ids: bool = False,
    needs_reward_components: bool = False,
    needs_sum_pi_squared: bool = False,
) -> Callable[[Compute], Compute]:
    """Decorator that makes a function available as `adv_estimator=name`. A name taken twice is a ValueError.

    Each flag names an input that a call without it is refused for; sum_pi_squared brings old_log_probs along.
    """

    def register(compute: Compute) -> Compute:
        if name in _ESTIMATORS:
            raise ValueError(f"advantage estimator {name!r} is already registered; choose another name")
        _ESTIMATORS[name] = AdvantageEstimator(
            name=name,
            compute=compute,
            needs_critic=needs_critic,
            needs_reward_baselines=needs_reward_baselines,
            needs_turn_ids=needs_turn_ids,
            needs_state_ids=needs_state_ids,
            needs_reward_components=needs_reward_components,
            needs_sum_pi_squared=needs_sum_pi_squared,
        )
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
