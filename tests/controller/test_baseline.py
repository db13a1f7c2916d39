"""Greedy baselines beside the rows: whose score goes where, and what becomes of prompts whose greedy episode failed."""

from collections.abc import Callable, Sequence

import pytest
import torch

from vrl.algorithms.advantages.registry import AdvantageParams, get_advantage
from vrl.controller.baseline import with_baselines
from vrl.controller.credit import Advantage, Rewards, reward_shaping
from vrl.controller.data_metrics import data_metrics, failure_metrics
from vrl.controller.roles import Generated
from vrl.protocol.columns import (
    ADVANTAGES,
    LOSS_MASK,
    POSITION_IDS,
    REWARD_BASELINES,
    SAMPLE_INDEX,
    TOKEN_LEVEL_REWARDS,
    TOKEN_LEVEL_SCORES,
    UID,
)
from vrl.protocol.config.algorithm import AlgorithmConfig
from vrl.protocol.config.builder import build
from vrl.protocol.dataproto import Meta
from vrl.protocol.rows import batch_of
from vrl.protocol.trajectory import StopReason, Trajectory

Make = Callable[..., Trajectory]
REMAX = Advantage(get_advantage("remax"), AdvantageParams())


def generated(trajectories: Sequence[Trajectory], positions: bool = False) -> Generated:
    """What the rollout makes of trajectories: failed ones apart."""
    lines = [torch.zeros(len(t.input_ids), 3, dtype=torch.int64) for t in trajectories] if positions else None
    rows = batch_of(trajectories, lines, Meta(policy_version=3))
    failed = torch.tensor([t.stop_reason is StopReason.FAILED for t in trajectories], dtype=torch.bool)
    return Generated(rows.rows(~failed), rows.rows(failed), 3, {"timing_s/reward": 0.5})


@pytest.fixture
def sampled(trajectory: Make) -> list[Trajectory]:
    """Three prompts of two samples; scores 1 and 0, 1 and 1, 0.5 and 0."""
    scores = {"u0": (1.0, 0.0), "u1": (1.0, 1.0), "u2": (0.5, 0.0)}
    return [
        trajectory(uid, score=score, sample_index=index)
        for uid, pair in scores.items()
        for index, score in enumerate(pair)
    ]


def test_every_row_gets_the_score_of_its_prompts_greedy_episode(trajectory: Make, sampled: list[Trajectory]):
    greedy = [trajectory(uid, turns=(3,), score=score) for uid, score in (("u2", 0.25), ("u0", 1.0), ("u1", 0.0))]
    result = with_baselines(generated(sampled), generated(greedy))
    assert result.rows.dense(REWARD_BASELINES).tolist() == [1.0, 1.0, 0.0, 0.0, 0.25, 0.25]
    assert (len(result.failed), result.policy_version, result.timing) == (0, 3, {"timing_s/reward": 0.5})
    assert data_metrics(result.rows)["critic/reward_baselines/mean"] == pytest.approx(1.25 / 3)
    batch = result.rows.with_columns(**{TOKEN_LEVEL_REWARDS: result.rows.ragged(TOKEN_LEVEL_SCORES)})
    advantages = REMAX(batch).ragged(ADVANTAGES).values[batch.ragged(LOSS_MASK).values].tolist()
    assert advantages == [0.0, 0.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 0.25, 0.25, -0.25, -0.25]


@pytest.mark.parametrize("positions", [False, True])
def test_rows_whose_greedy_episode_failed_are_left_out_and_counted(
    trajectory: Make, sampled: list[Trajectory], positions: bool
):
    rows = [*sampled, trajectory("u2", sample_index=2, failure="reward raised: oh")]
    greedy = [trajectory("u0", score=1.0), trajectory("u1", failure="reward timed out: 30 s"), trajectory("u2")]
    result = with_baselines(generated(rows, positions), generated(greedy, positions))
    assert list(result.rows.objects[UID]) == ["u0", "u0", "u2", "u2"]
    assert result.rows.dense(REWARD_BASELINES).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert (POSITION_IDS in result.rows) == positions
    assert list(result.failed.objects[UID]) == ["u2", "u1"]
    assert result.failed.dense(SAMPLE_INDEX).tolist() == [2, -1]
    counts = failure_metrics(result.failed)
    assert counts["training/failed_rows"] == 2
    assert counts["training/failed_baselines"] == 1
    assert counts["training/failed_rows/reward_timed_out"] == 1


def test_the_greedy_score_is_shaped_as_those_of_the_rows(trajectory: Make):
    shaping = reward_shaping(
        build({
            "reward_model": {
                "overlong_buffer": {"enable": True, "len": 4, "penalty_factor": 1.0},
                "max_resp_len": 8,
                "reward_clip": 2.0,
            }
        })
    )  # fmt: skip
    rows = generated([trajectory("u0", score=5.0), trajectory("u0", turns=(6,), score=1.0), trajectory("u1")])
    greedy = generated([trajectory("u0", turns=(6,), score=1.0), trajectory("u1", score=5.0)])
    found = with_baselines(rows, greedy, shaping).rows
    assert found.dense(REWARD_BASELINES).tolist() == [0.5, 0.5, 2.0]
    batch = found.union(Rewards(AlgorithmConfig(), shaping)(found))
    advantages = REMAX(batch).ragged(ADVANTAGES).values[batch.ragged(LOSS_MASK).values].tolist()
    assert advantages == [1.5] * 2 + [0.0] * 6 + [-2.0] * 2  # a sample like the greedy one is neither good nor bad


def test_no_row_is_left_when_every_greedy_episode_failed(trajectory: Make, sampled: list[Trajectory]):
    greedy = [trajectory(uid, failure="reward raised: oh") for uid in ("u0", "u1", "u2")]
    result = with_baselines(generated(sampled), generated(greedy))
    assert len(result.rows) == 0
    assert failure_metrics(result.failed)["training/failed_baselines"] == 3
