"""From scores to rewards: overlong penalty, reward clipping and KL, on rows as a rollout worker hands them over."""

from collections.abc import Callable

import pytest
import torch

from vrl.controller.credit import OverlongPenalty, RewardClip, Rewards, reward_shaping
from vrl.controller.data_metrics import data_metrics, row_sums
from vrl.protocol.columns import LOSS_MASK, OLD_LOG_PROBS, REF_LOG_PROBS, TOKEN_LEVEL_REWARDS, TOKEN_LEVEL_SCORES
from vrl.protocol.config.algorithm import AlgorithmConfig, KlCtrlConfig
from vrl.protocol.config.builder import build
from vrl.protocol.dataproto import DataProto, Meta
from vrl.protocol.ragged import Ragged
from vrl.protocol.rows import batch_of
from vrl.protocol.trajectory import Trajectory

OFF = AlgorithmConfig()


@pytest.fixture
def batch(trajectory: Callable[..., Trajectory]) -> DataProto:
    """Responses of 2, 6, 8 and 11 tokens, the third with an observation of one token; scores 1, 1, 0 and 3."""
    rows = [
        trajectory("u0", turns=(2,), score=1.0),
        trajectory("u0", turns=(6,), score=1.0),
        trajectory("u1", turns=(3, 4), score=0.0),
        trajectory("u1", turns=(11,), score=3.0),
    ]
    return batch_of(rows, None, Meta())


def rewards_of(batch: DataProto, rewards: Rewards) -> list[float]:
    return row_sums(batch.union(rewards(batch)), TOKEN_LEVEL_REWARDS).tolist()


def test_without_shaping_and_kl_the_rewards_are_the_scores(batch: DataProto):
    rewards = Rewards(OFF, reward_shaping(build({})))
    new = rewards(batch)
    assert new.ragged(TOKEN_LEVEL_REWARDS).values is batch.ragged(TOKEN_LEVEL_SCORES).values
    assert rewards.metrics == {}


def test_overlong_penalty_grows_over_the_buffer_and_stands_on_the_last_sampled_token(batch: DataProto):
    rewards = Rewards(OFF, [OverlongPenalty(max_length=10, buffer=4, factor=0.5)])
    assert rewards_of(batch, rewards) == [1.0, 1.0, -0.25, 2.5]  # 6 tokens are free, 8 pay half, 11 all
    token = rewards(batch).ragged(TOKEN_LEVEL_REWARDS)
    assert [float(row[-1]) for row in token.to_rows()] == [1.0, 1.0, -0.25, 2.5]
    assert rewards.metrics == {
        "critic/overlong_reward/mean": -0.1875,
        "critic/overlong_reward/min": -0.5,
        "critic/overlong": 0.5,
    }
    metrics = data_metrics(batch.union(rewards(batch)))
    assert metrics["critic/score/mean"] == 1.25  # scores stay what the reward function said
    assert metrics["critic/rewards/mean"] == pytest.approx(1.25 - 0.1875)


def test_a_row_without_a_sampled_token_pays_nothing(trajectory: Callable[..., Trajectory]):
    batch = batch_of([trajectory("u0", turns=(12,)), trajectory("u0", prompt=20, turns=())], None, Meta())
    assert rewards_of(batch, Rewards(OFF, [OverlongPenalty(max_length=10, buffer=4, factor=1.0)])) == [-1.0, 0.0]


def test_rewards_are_clipped_after_the_penalty(batch: DataProto):
    settings = {"enable": True, "len": 4, "penalty_factor": 0.5}
    config = build({"reward_model": {"overlong_buffer": settings, "max_resp_len": 10, "reward_clip": 0.75}})
    rewards = Rewards(OFF, reward_shaping(config))
    assert rewards_of(batch, rewards) == [0.75, 0.75, -0.25, 0.75]
    assert rewards.metrics["critic/rewards_clipped"] == 3.0
    assert rewards_of(batch, Rewards(OFF, [RewardClip(2.0)])) == [1.0, 1.0, 0.0, 2.0]


def test_the_limit_of_the_penalty_is_the_response_length_where_none_is_given():
    buffer = {"enable": True, "len": 8, "penalty_factor": 1.0}
    (part,) = reward_shaping(build({"data": {"max_response_length": 100}, "reward_model": {"overlong_buffer": buffer}}))
    assert part == OverlongPenalty(max_length=100, buffer=8, factor=1.0)


def test_kl_is_taken_off_the_shaped_rewards(batch: DataProto):
    mask = batch.ragged(LOSS_MASK)
    old = Ragged(torch.where(mask.values, -0.5, 0.0), mask.offsets)
    reference = Ragged(torch.where(mask.values, -1.5, 0.0), mask.offsets)  # one nat a sampled token
    batch = batch.with_columns(**{OLD_LOG_PROBS: old, REF_LOG_PROBS: reference})
    algorithm = AlgorithmConfig(use_kl_in_reward=True, kl_ctrl=KlCtrlConfig(kl_coef=0.5))
    rewards = Rewards(algorithm, [OverlongPenalty(max_length=10, buffer=4, factor=0.5)])
    assert rewards_of(batch, rewards) == [1.0 - 1.0, 1.0 - 3.0, -0.25 - 3.5, 2.5 - 5.5]
    assert rewards.metrics["actor/reward_kl_penalty"] == pytest.approx(1.0)
    assert rewards.metrics["critic/overlong"] == 0.5
