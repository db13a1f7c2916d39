"""From scores to advantages, on the driver: KL in the reward and the advantage estimator. Light work, flat tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from vrl.algorithms.advantages.registry import (
    AdvantageEstimator,
    AdvantageInputs,
    AdvantageParams,
)
from vrl.algorithms.kl import AdaptiveKl, FixedKl, kl_estimate, kl_in_reward, sequence_mean_kl
from vrl.controller.score_parts import score_parts
from vrl.protocol.columns import (
    ADVANTAGES,
    INPUT_IDS,
    LOSS_MASK,
    OLD_LOG_PROBS,
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
from vrl.protocol.dataproto import DataProto
from vrl.protocol.ragged import Ragged


@final
class KlInReward:
    """token_level_rewards = token_level_scores - beta * KL(old policy, reference) on sampled tokens.

    Off, the rewards are the scores. `controller` is the state that a checkpoint keeps.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
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
        """Return the rewards column; `metrics` then holds this step's KL and coefficient."""
        scores = batch.ragged(TOKEN_LEVEL_SCORES)
        if not self._on:
            return DataProto({TOKEN_LEVEL_REWARDS: scores})
        mask = batch.ragged(LOSS_MASK).values
        kl = kl_estimate(batch.ragged(OLD_LOG_PROBS).values, batch.ragged(REF_LOG_PROBS).values, mask, self._estimator)
        rewards = kl_in_reward(scores.values, kl, mask, self.controller.beta)
        mean = sequence_mean_kl(kl, mask, scores.offsets)
        self.metrics = {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": self.controller.beta}
        self.controller = self.controller.updated(mean, len(batch))
        return DataProto({TOKEN_LEVEL_REWARDS: Ragged(rewards, scores.offsets)})


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
