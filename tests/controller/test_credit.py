"""From scores to rewards: overlong penalty, reward clipping and KL, on rows as a rollout worker hands them over."""

from collections.abc import Callable

import pytest
import torch

from vrl.algorithms.advantages.registry import AdvantageParams, get_advantage
from vrl.controller.corrections import Corrections, corrections
from vrl.controller.credit import Advantage, OverlongPenalty, RewardClip, Rewards, reward_shaping, state_ids
from vrl.controller.data_metrics import data_metrics, row_sums
from vrl.controller.run import advantage_of
from vrl.protocol.columns import (
    ADVANTAGES,
    LOSS_MASK,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    RETURNS,
    ROLLOUT_LOG_PROBS,
    SUM_PI_SQUARED,
    TOKEN_LEVEL_REWARDS,
    TOKEN_LEVEL_SCORES,
)
from vrl.protocol.config.algorithm import AlgorithmConfig, KlCtrlConfig
from vrl.protocol.config.builder import build
from vrl.protocol.dataproto import DataProto, Meta
from vrl.protocol.ragged import Ragged
from vrl.protocol.rows import batch_of
from vrl.protocol.trajectory import StopReason, Trajectory

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


def test_a_checkpoint_restores_the_coefficient_that_adapts_and_not_the_one_that_is_set(
    batch: DataProto, caplog: pytest.LogCaptureFixture
):
    mask = batch.ragged(LOSS_MASK)
    old = Ragged(torch.where(mask.values, -0.5, 0.0), mask.offsets)
    reference = Ragged(torch.where(mask.values, -1.5, 0.0), mask.offsets)
    batch = batch.with_columns(**{OLD_LOG_PROBS: old, REF_LOG_PROBS: reference})

    def rewards(kind: str, coefficient: float) -> Rewards:
        control = KlCtrlConfig(type=kind, kl_coef=coefficient, target_kl=0.1, horizon=40)
        return Rewards(AlgorithmConfig(use_kl_in_reward=True, kl_ctrl=control))

    before, after, fixed = rewards("adaptive", 0.5), rewards("adaptive", 0.5), rewards("fixed", 0.25)
    before(batch)
    kept = before.controller.beta
    assert kept == pytest.approx(0.5 * (1 + 0.2 * 4 / 40))
    with caplog.at_level("INFO", logger="vrl.controller.credit"):
        after.restore(kept)
        assert caplog.text == ""
        fixed.restore(kept)
    assert rewards_of(batch, after) == rewards_of(batch, before)
    assert after.controller == before.controller
    assert fixed.controller.beta == 0.25
    assert caplog.messages == [f"algorithm.kl_ctrl.kl_coef=0.25 holds; the checkpoint has {kept}"]


def sampled(batch: DataProto, values: torch.Tensor) -> list[list[float]]:
    mask = batch.ragged(LOSS_MASK)
    rows = Ragged(values, mask.offsets).to_rows()
    return [row[own].tolist() for row, own in zip(rows, mask.to_rows(), strict=True)]


def test_gigpo_compares_turns_that_answer_the_same_state(trajectory: Callable[..., Trajectory]):
    rows = [
        trajectory("u0", turns=(2, 1), score=1.0, turn_states=("start", "door")),
        trajectory("u0", turns=(1, 1), score=0.0, turn_states=("start", "wall")),
        trajectory("u0", turns=(1, 1, 2), score=0.0, turn_states=("start", "wall", "door")),
    ]
    batch = batch_of(rows, None, Meta())
    batch = batch.with_columns(**{TOKEN_LEVEL_REWARDS: batch.ragged(TOKEN_LEVEL_SCORES)})
    ids = sampled(batch, state_ids(batch))
    assert ids == [[0, 0, 1], [0, 2], [0, 2, 1, 1]]
    assert (state_ids(batch)[~batch.ragged(LOSS_MASK).values] == -1).all()
    params = AdvantageParams(norm_adv_by_std=False, step_advantage_w=2.0)
    found = sampled(batch, Advantage(get_advantage("gigpo"), params)(batch).ragged(ADVANTAGES).values)
    start, door = 2 / 3 + 2 * 2 / 3, 2 / 3 + 2 * 0.5
    lost = -1 / 3
    assert found[0] == pytest.approx([start, start, door])
    assert found[1] == pytest.approx([lost - 2 / 3, lost])
    assert found[2] == pytest.approx([lost - 2 / 3, lost, lost - 1.0, lost - 1.0])
    short = batch_of([trajectory("u0", turns=(1, 1), turn_states=("start",))], None, Meta())
    with pytest.raises(ValueError, match="row 0 names 1 turn_states and has a turn 1"):
        state_ids(short)
    nothing = batch_of([trajectory("u0", turns=()), trajectory("u0", turns=(1,))], None, Meta())
    assert state_ids(nothing).tolist() == [-1, -1, -1, -1, -1, -1, 0]


def test_the_last_row_of_a_group_that_needs_peers_gets_nothing(trajectory: Callable[..., Trajectory]):
    uids, scores = ["u0", "u1", "u0", "u2"], [1.0, 5.0, 0.0, 7.0]
    rows = [trajectory(uid, turns=(2, 1), score=score) for uid, score in zip(uids, scores, strict=True)]
    batch = batch_of(rows, None, Meta())
    batch = batch.with_columns(**{TOKEN_LEVEL_REWARDS: batch.ragged(TOKEN_LEVEL_SCORES)})
    advantage = Advantage(get_advantage("grpo_passk"), AdvantageParams(norm_adv_by_std=False))
    for column in (ADVANTAGES, RETURNS):
        assert sampled(batch, advantage(batch).ragged(column).values) == [[1.0] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3]
    lonely = advantage(batch.rows([1, 3]))
    assert not lonely.ragged(ADVANTAGES).values.any()


def test_squared_probabilities_reach_the_estimator(trajectory: Callable[..., Trajectory]):
    batch = batch_of([trajectory("u0", turns=(1,), score=score) for score in (1.0, 0.0)], None, Meta())
    mask = batch.ragged(LOSS_MASK)
    squares = torch.where(mask.values, torch.tensor([0.5, 0.875]).repeat_interleave(mask.lengths), 0.0)
    batch = batch.with_columns(
        **{
            TOKEN_LEVEL_REWARDS: batch.ragged(TOKEN_LEVEL_SCORES),
            OLD_LOG_PROBS: Ragged(torch.full_like(squares, -0.6931471805599453), mask.offsets),
            SUM_PI_SQUARED: Ragged(squares, mask.offsets),
        }
    )
    found = Advantage(get_advantage("optimal_token_baseline"), AdvantageParams())(batch).ragged(ADVANTAGES).values
    baseline = 0.5 / (0.5 + 0.875)  # weights are 1 - 2 pi + sum of squares
    assert found[mask.values].tolist() == pytest.approx([1 - baseline, -baseline], rel=1e-5)


def two_policies(trajectory: Callable[..., Trajectory]) -> DataProto:
    """Return a group of rows of one sampled token that gets 1, 0 and 3, with pi / mu of 2, 1 and 4; the last is cut."""
    rows = [
        trajectory("u0", turns=(1,), score=1.0),
        trajectory("u0", turns=(1,), score=0.0),
        trajectory("u0", turns=(1,), score=3.0, stop_reason=StopReason.LENGTH),
    ]
    batch = batch_of(rows, None, Meta())
    mask = batch.ragged(LOSS_MASK)

    def sampled_only(values: list[float]) -> Ragged:
        return Ragged(torch.where(mask.values, torch.tensor(values).repeat_interleave(mask.lengths), 0.0), mask.offsets)

    return batch.with_columns(
        **{
            TOKEN_LEVEL_REWARDS: batch.ragged(TOKEN_LEVEL_SCORES),
            OLD_LOG_PROBS: sampled_only([-0.6931471805599453] * 3),
            ROLLOUT_LOG_PROBS: sampled_only(torch.tensor([0.25, 0.5, 0.125]).log().tolist()),
            SUM_PI_SQUARED: sampled_only([0.5, 0.875, 0.75]),
        }
    )


def otb(**settings: object) -> tuple[Advantage, Corrections]:
    algorithm = {"adv_estimator": "optimal_token_baseline", **settings}
    config = build({"algorithm": algorithm})
    return advantage_of(config), corrections(config.algorithm)


@pytest.mark.parametrize(
    ("settings", "ratios"),
    [
        ({}, (1.0, 1.0, 1.0)),
        ({"rollout_is": "token", "rollout_is_threshold": 3.0}, (2.0, 1.0, 3.0)),
        ({"rollout_is": "sequence", "rollout_is_threshold": 9.0}, (2.0, 1.0, 4.0)),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_3.0"}, (2.0, 1.0, 0.0)),
        ({"rollout_is": "token", "rollout_is_threshold": 3.0, "rollout_is_batch_normalize": True}, (2.0, 1.0, 3.0)),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 3.0}, (1.0, 1.0, 1.0)),
    ],
    ids=str,
)
def test_the_baseline_is_weighed_by_the_importance_of_every_sampled_token(
    trajectory: Callable[..., Trajectory], settings: dict[str, object], ratios: tuple[float, ...]
):
    batch = two_policies(trajectory)
    advantage, _ = otb(rollout_correction=settings, mask_truncated_completions=True)
    norms = [weight * ratio**2 for weight, ratio in zip((0.5, 0.875, 0.75), ratios, strict=True)]
    baseline = (1.0 * norms[0] + 3.0 * norms[2]) / sum(norms)
    found = advantage(batch).ragged(ADVANTAGES).values[batch.ragged(LOSS_MASK).values]
    assert found.tolist() == pytest.approx([1.0 - baseline, -baseline, 3.0 - baseline], rel=1e-5)


def test_what_is_rejected_or_cut_leaves_the_loss_and_not_the_baseline(trajectory: Callable[..., Trajectory]):
    weighed = {"rollout_is": "token", "rollout_is_threshold": 3.0}
    rejecting = {**weighed, "rollout_rs": "token_k1", "rollout_rs_threshold": 3.0}
    batch = two_policies(trajectory)
    plain, _ = otb(rollout_correction=weighed)
    advantage, correct = otb(rollout_correction=rejecting)
    assert torch.equal(advantage(batch).ragged(ADVANTAGES).values, plain(batch).ragged(ADVANTAGES).values)
    learnt, metrics = correct(batch.union(advantage(batch)))
    assert [int(row.sum()) for row in learnt.ragged(LOSS_MASK).to_rows()] == [1, 1, 0]
    assert metrics == correct(batch)[1]


def test_a_ratio_that_is_no_number_stays_out_of_the_baseline_of_its_group(trajectory: Callable[..., Trajectory]):
    batch = two_policies(trajectory)
    rollout = batch.ragged(ROLLOUT_LOG_PROBS)
    broken = rollout.values.clone()
    broken[-1] = float("nan")
    batch = batch.with_columns(**{ROLLOUT_LOG_PROBS: Ragged(broken, rollout.offsets)})
    advantage, _ = otb(rollout_correction={"rollout_is": "token", "rollout_is_threshold": 3.0})
    found = advantage(batch).ragged(ADVANTAGES).values[batch.ragged(LOSS_MASK).values]
    baseline = 2.0 / (2.0 + 0.875)
    assert found.tolist() == pytest.approx([1.0 - baseline, -baseline, 3.0 - baseline], rel=1e-5)


def test_weights_are_computed_for_the_estimator_that_reads_them_only():
    settings = {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}}
    assert advantage_of(build({"algorithm": settings})).correction is None
