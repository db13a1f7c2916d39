"""From scores to advantages, on the driver: reward shaping, KL in the reward, estimator. Light work, flat tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    TOKEN_LEVEL_REWARDS,
    TOKEN_LEVEL_SCORES,
    TURN_IDS,
    UID,
    VALUES,
)
from vrl.protocol.config.algorithm import AlgorithmConfig
from vrl.protocol.config.schema import Config
from vrl.protocol.dataproto import DataProto
from vrl.protocol.ragged import Ragged

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
        scores, self.metrics = batch.ragged(TOKEN_LEVEL_SCORES), {}
        rewards = scores.values
        for shape in self._shaping:
            rewards, metrics = shape(batch, rewards)
            self.metrics |= metrics
        if self._on:
            rewards = self._less_kl(batch, rewards)
        return DataProto({TOKEN_LEVEL_REWARDS: Ragged(rewards, scores.offsets)})

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

    def __call__(self, batch: DataProto) -> DataProto:
        """Return the advantages and returns columns."""
        rewards = batch.ragged(TOKEN_LEVEL_REWARDS)
        number = {uid: i for i, uid in enumerate(dict.fromkeys(batch.objects[UID]))}
        inputs = AdvantageInputs(
            token_level_rewards=rewards.values,
            mask=batch.ragged(LOSS_MASK).values,
            group=torch.tensor([number[uid] for uid in batch.objects[UID]], dtype=torch.int64),
            offsets=batch.ragged(INPUT_IDS).offsets,
            values=batch.ragged(VALUES).values if VALUES in batch else None,
            turn_ids=batch.ragged(TURN_IDS).values,
            reward_baselines=batch.dense(REWARD_BASELINES) if REWARD_BASELINES in batch else None,
            reward_components=score_parts(batch, self.reward_keys) if self.reward_keys else None,
        )
        outputs = self.estimator(inputs, self.params)
        return DataProto(
            {
                ADVANTAGES: Ragged(outputs.advantages, rewards.offsets),
                RETURNS: Ragged(outputs.returns, rewards.offsets),
            }
        )
