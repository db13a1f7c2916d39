"""From scores to advantages, on the driver: reward shaping, KL in the reward, estimator. Light work, flat tensors."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from vrl.algorithms import segments
from vrl.algorithms.advantages.registry import (
    AdvantageEstimator,
    AdvantageInputs,
    AdvantageParams,
)
from vrl.algorithms.kl import AdaptiveKl, FixedKl, kl_estimate, kl_in_reward, sequence_mean_kl
from vrl.algorithms.reward_shaping import clip_rewards, overlong_penalty
from vrl.algorithms.rollout_correction import RolloutCorrectionParams, importance_weights
from vrl.controller.data_metrics import row_sums
from vrl.controller.score_parts import score_parts
from vrl.protocol.columns import (
    ADVANTAGES,
    INPUT_IDS,
    LOSS_MASK,
    OLD_LOG_PROBS,
    PROMPT_LENGTH,
    REF_LOG_PROBS,
    RETURNS,
    REWARD_BASELINES,
    ROLLOUT_LOG_PROBS,
    SUM_PI_SQUARED,
    TOKEN_LEVEL_REWARDS,
    TOKEN_LEVEL_SCORES,
    TURN_IDS,
    TURN_STATES,
    VALUES,
)
from vrl.protocol.config.algorithm import AlgorithmConfig
from vrl.protocol.config.names import PEER_ESTIMATORS
from vrl.protocol.config.schema import Config
from vrl.protocol.dataproto import DataProto
from vrl.protocol.ragged import Ragged
from vrl.protocol.rows import group_numbers

_LOG = logging.getLogger(__name__)

Shaping = Callable[[DataProto, Tensor], tuple[Tensor, dict[str, float]]]  # rows, their rewards [T] -> new ones, metrics


@final
@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """DAPO's soft overlong punishment, on the last sampled token of a row.

    A response is what follows the prompt, observations included, as in `data.max_response_length`.
    """

    max_length: int
    buffer: int
    factor: float

    def __call__(self, batch: DataProto, rewards: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Return the rewards less the penalty; metrics are its mean and the share of rows that pay."""
        mask = batch.ragged(LOSS_MASK)
        lengths = mask.lengths - batch.dense(PROMPT_LENGTH)
        penalty = overlong_penalty(lengths, self.max_length, self.buffer, self.factor)
        metrics = {
            "critic/overlong_reward/mean": float(penalty.double().mean()),
            "critic/overlong_reward/min": float(penalty.min()),
            "critic/overlong": float((penalty < 0).double().mean()),
        }
        return rewards + segments.place_on_last_sampled(penalty, mask.values, mask.offsets), metrics


@final
@dataclass(frozen=True, slots=True)
class RewardClip:
    """Rewards held within -limit and limit: of a row, or of each of its turns where turns have rewards."""

    limit: float

    def __call__(self, _batch: DataProto, rewards: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Return the clipped rewards; the metric counts those that were outside."""
        clipped = clip_rewards(rewards, -self.limit, self.limit)
        return clipped, {"critic/rewards_clipped": float((clipped != rewards).sum())}


def reward_shaping(config: Config) -> tuple[Shaping, ...]:
    """Return what changes scores, in order; nothing unless the settings ask for it."""
    reward, parts = config.reward_model, list[Shaping]()
    buffer = reward.overlong_buffer
    if buffer.enable:
        parts.append(OverlongPenalty(config.overlong_length, buffer.len, buffer.penalty_factor))
    if reward.reward_clip is not None:
        parts.append(RewardClip(reward.reward_clip))
    return tuple(parts)


def shaped_row_sums(rows: DataProto, shaping: Sequence[Shaping]) -> Tensor:
    """Return float64 `[B]`: the shaped score of each row, as `Rewards` gives it to the rows of a step without a KL."""
    rewards, _ = _shaped(rows, shaping)
    return row_sums(DataProto({TOKEN_LEVEL_REWARDS: rewards}), TOKEN_LEVEL_REWARDS)


def _shaped(rows: DataProto, shaping: Sequence[Shaping]) -> tuple[Ragged, dict[str, float]]:
    """Return the scores of all tokens after every shaping, and what those report."""
    scores, metrics = rows.ragged(TOKEN_LEVEL_SCORES), dict[str, float]()
    rewards = scores.values
    for shape in shaping:
        rewards, found = shape(rows, rewards)
        metrics |= found
    return Ragged(rewards, scores.offsets), metrics


@final
class Rewards:
    """token_level_rewards = shaped token_level_scores - beta * KL(old policy, reference) on sampled tokens.

    With no shaping and no KL the rewards are the scores. `controller` is the state that a checkpoint keeps.
    """

    def __init__(self, config: AlgorithmConfig, shaping: Sequence[Shaping] = ()) -> None:
        self._shaping = tuple(shaping)
        self._on = config.use_kl_in_reward
        self._estimator = config.kl_penalty
        control = config.kl_ctrl
        self.controller: FixedKl | AdaptiveKl = (
            FixedKl(control.kl_coef)
            if control.type == "fixed"
            else AdaptiveKl(control.kl_coef, control.target_kl, control.horizon)
        )
        self.metrics: dict[str, float] = {}

    def __call__(self, batch: DataProto) -> DataProto:
        """Return the rewards column; `metrics` then holds what shaping did, this step's KL and its coefficient."""
        rewards, self.metrics = _shaped(batch, self._shaping)
        if self._on:
            rewards = Ragged(self._less_kl(batch, rewards.values), rewards.offsets)
        return DataProto({TOKEN_LEVEL_REWARDS: rewards})

    def restore(self, beta: float) -> None:
        """Go on from a checkpoint's KL coefficient where it adapts; a fixed one is that of the settings."""
        if isinstance(self.controller, AdaptiveKl):
            self.controller = replace(self.controller, beta=beta)
        elif self._on and beta != self.controller.beta:
            _LOG.info("algorithm.kl_ctrl.kl_coef=%s holds; the checkpoint has %s", self.controller.beta, beta)

    def _less_kl(self, batch: DataProto, rewards: Tensor) -> Tensor:
        mask = batch.ragged(LOSS_MASK).values
        kl = kl_estimate(batch.ragged(OLD_LOG_PROBS).values, batch.ragged(REF_LOG_PROBS).values, mask, self._estimator)
        rewards = kl_in_reward(rewards, kl, mask, self.controller.beta)
        mean = sequence_mean_kl(kl, mask, batch.ragged(LOSS_MASK).offsets)
        self.metrics |= {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": self.controller.beta}
        self.controller = self.controller.updated(mean, len(batch))
        return rewards


@final
@dataclass(frozen=True, slots=True)
class Advantage:
    """The estimator with its settings."""

    estimator: AdvantageEstimator
    params: AdvantageParams
    reward_keys: Sequence[str] = ()  # parts of the score to hand over
    correction: RolloutCorrectionParams | None = None  # whose importance weights to hand over

    def __call__(self, batch: DataProto) -> DataProto:
        """Return the advantages and returns columns; 0 for a row that needs peers and is the last of its group."""
        if self.estimator.name not in PEER_ESTIMATORS:
            return self._estimate(batch)
        group = group_numbers(batch)
        alone = torch.bincount(group)[group] == 1
        if not bool(alone.any()):
            return self._estimate(batch)
        rewards = batch.ragged(TOKEN_LEVEL_REWARDS)
        columns = {name: torch.zeros_like(rewards.values) for name in (ADVANTAGES, RETURNS)}
        if not bool(alone.all()):
            found = self._estimate(batch.rows(~alone))
            tokens = torch.repeat_interleave(~alone, rewards.lengths)
            for name, values in columns.items():
                values[tokens] = found.ragged(name).values
        return DataProto({name: Ragged(values, rewards.offsets) for name, values in columns.items()})

    def _estimate(self, batch: DataProto) -> DataProto:
        rewards = batch.ragged(TOKEN_LEVEL_REWARDS)
        inputs = AdvantageInputs(
            token_level_rewards=rewards.values,
            mask=batch.ragged(LOSS_MASK).values,
            group=group_numbers(batch),
            offsets=batch.ragged(INPUT_IDS).offsets,
            values=_tokens(batch, VALUES),
            turn_ids=batch.ragged(TURN_IDS).values,
            reward_baselines=batch.dense(REWARD_BASELINES) if REWARD_BASELINES in batch else None,
            reward_components=score_parts(batch, self.reward_keys) if self.reward_keys else None,
            state_ids=state_ids(batch) if self.estimator.needs_state_ids else None,
            old_log_probs=_tokens(batch, OLD_LOG_PROBS),
            sum_pi_squared=_tokens(batch, SUM_PI_SQUARED),
            rollout_is_weights=None if self.correction is None else _weights(batch, self.correction),
        )
        outputs = self.estimator(inputs, self.params)
        return DataProto(
            {
                ADVANTAGES: Ragged(outputs.advantages, rewards.offsets),
                RETURNS: Ragged(outputs.returns, rewards.offsets),
            }
        )


def _tokens(batch: DataProto, name: str) -> Tensor | None:
    return batch.ragged(name).values if name in batch else None


def _weights(batch: DataProto, params: RolloutCorrectionParams) -> Tensor:
    """Return the importance weights `[T]` of all sampled tokens, rows that are cut or rejected later among them.

    Where the ratio is not a number the weight is 0: what rejection takes out of the loss must not spoil its group.
    """
    mask = batch.ragged(LOSS_MASK)
    old, rollout = batch.ragged(OLD_LOG_PROBS).values, batch.ragged(ROLLOUT_LOG_PROBS).values
    return importance_weights(old, rollout, mask.values, mask.offsets, params).nan_to_num(nan=0.0)


def state_ids(batch: DataProto) -> Tensor:
    """Return int64 `[T]`: the number of the state that each sampled token's turn answers, -1 elsewhere.

    Equal numbers are equal entries of column `turn_states`. Raises ValueError for a row with more turns than states.
    """
    turns = batch.ragged(TURN_IDS)
    rows: list[tuple[str, ...]] = batch.objects[TURN_STATES].tolist()
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    of_row = torch.repeat_interleave(torch.arange(len(rows)), turns.lengths)
    missing = turns.values >= counts[of_row]
    if bool(missing.any()):
        row = int(of_row[missing][0])
        raise ValueError(f"row {row} names {len(rows[row])} turn_states and has a turn {int(turns.values[missing][0])}")
    number = {state: i for i, state in enumerate(dict.fromkeys(state for row in rows for state in row))}
    numbers = torch.tensor([*(number[state] for row in rows for state in row), -1], dtype=torch.int64)
    found = numbers[(counts.cumsum(0) - counts)[of_row] + turns.values.clamp(min=0)]
    return torch.where(turns.values >= 0, found, -1)
