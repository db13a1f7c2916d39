"""Advantage estimators on rows made by hand: the requirements on groups, returns and borders, and speed."""

import math
import time

import pytest
import torch

from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageParams, get_advantage, known_advantages
from vrl.algorithms.metrics import equal_group_share
from vrl.algorithms.padded import from_padded, to_padded
from vrl.algorithms.segments import place_on_last_sampled
from vrl.protocol.config.names import ZERO_VARIANCE_ESTIMATORS

OVER_GROUPS = ("grpo", "rloo", "opo", "gpg")


def batch(rewards, mask, group=None, values=None, dtype=torch.float32):
    """Inputs from padded lists."""
    flat, offsets = from_padded(torch.tensor(rewards, dtype=dtype))
    return AdvantageInputs(
        token_level_rewards=flat,
        mask=from_padded(torch.tensor(mask))[0].bool(),
        group=torch.tensor(group if group is not None else list(range(len(rewards)))),
        offsets=offsets,
        values=from_padded(torch.tensor(values, dtype=dtype))[0] if values is not None else None,
    )


def with_everything(mask, offsets):
    """Inputs for any estimator: one group, a reward of 0, garbage on tokens that were not sampled."""
    rows = len(offsets) - 1
    garbage = torch.full(mask.shape, math.nan)
    return AdvantageInputs(
        token_level_rewards=torch.zeros(mask.shape),
        mask=mask,
        group=torch.zeros(rows, dtype=torch.int64),
        offsets=torch.tensor(offsets),
        values=garbage,
        reward_baselines=torch.ones(rows),
        turn_ids=torch.full(mask.shape, -1, dtype=torch.int32),
        state_ids=torch.full(mask.shape, -1, dtype=torch.int32),
        reward_components=torch.zeros(rows, 2),
        old_log_probs=garbage,
        sum_pi_squared=garbage,
    )


def one_token_rows(scores, group=None, dtype=torch.float32):
    return batch([[s] for s in scores], [[1]] * len(scores), group or [0] * len(scores), dtype=dtype)


@pytest.mark.parametrize("name", [*OVER_GROUPS, "grpo_passk", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("scores", [[0.7] * 7, [0.1 + 0.2] * 3, [-1e4 / 3] * 5, [1.0, 1.0], [0.0] * 4])
def test_ra1_equal_group_gives_exactly_zero(name, scores):
    for dtype in (torch.float32, torch.float64):
        outputs = get_advantage(name)(one_token_rows(scores, dtype=dtype), AdvantageParams())
        assert outputs.advantages.tolist() == [0.0] * len(scores)


@pytest.mark.parametrize("name", OVER_GROUPS)
def test_ra1_equal_group_beside_others_gives_exactly_zero(name):
    outputs = get_advantage(name)(one_token_rows([0.7, 0.0, 0.7, 1.0, 0.7], [4, 1, 4, 1, 4]), AdvantageParams())
    assert outputs.advantages[[0, 2, 4]].tolist() == [0.0] * 3
    assert outputs.advantages[3] > 0 > outputs.advantages[1]


def test_ra1_share_of_equal_groups():
    scores = torch.tensor([0.7, 0.7, 0.0, 1.0, 1.0, 1.0, 0.5])
    assert equal_group_share(scores, torch.tensor([0, 0, 1, 1, 2, 2, 3])) == 0.5  # a group of one still trains
    assert equal_group_share(scores[:0], torch.tensor([], dtype=torch.int64)) == 0.0


def test_ra2_low_spread():
    outputs = get_advantage("grpo")(one_token_rows([2.0, 2.00002, 2.00004, 2.00006]), AdvantageParams())
    expected = torch.tensor([-1.1186, -0.3729, 0.3729, 1.1186])
    torch.testing.assert_close(outputs.advantages, expected, rtol=0.03, atol=0.0)


def test_ra3_groups_are_ids_wherever_their_rows_stand():
    together = get_advantage("grpo")(one_token_rows([1.0, 0.0, 3.0, 1.0], [7, 7, -2, -2]), AdvantageParams())
    apart = get_advantage("grpo")(one_token_rows([1.0, 3.0, 0.0, 1.0], [7, -2, 7, -2]), AdvantageParams())
    assert torch.equal(apart.advantages, together.advantages[[0, 2, 1, 3]])


def test_ra4_empty_response_gets_no_reward():
    mask, offsets = from_padded(torch.tensor([[0, 0, 0], [1, 1, 0]]).bool())
    rewards = place_on_last_sampled(torch.tensor([10.0, 1.0]), mask, offsets)
    assert to_padded(rewards, offsets).tolist() == [[0, 0, 0], [0, 1, 0]]


def test_ra5_returns_flow_through_observations():
    inputs = batch([[0, 0, 0, 0, 1]], [[1, 1, 0, 0, 1]])
    outputs = get_advantage("reinforce_plus_plus")(inputs, AdvantageParams(gamma=0.9))
    torch.testing.assert_close(outputs.returns, torch.tensor([0.81, 0.9, 0.0, 0.0, 1.0]))


def test_ra6_values_behind_the_response_do_not_leak():
    params = AdvantageParams(gamma=1.0, lam=0.95)
    expected = torch.tensor([0.45125, 0.475, 0.5, 0.0, 0.0])
    for garbage in (0.0, 7.0, math.nan):
        values = [[0.5, 0.5, 0.5, garbage, garbage]]
        inputs = batch([[0, 0, 1, 0, 0]], [[1, 1, 1, 0, 0]], values=values)
        unwhitened = get_advantage("gae")(inputs, params).returns - torch.tensor([0.5, 0.5, 0.5, 0.0, 0.0])
        torch.testing.assert_close(unwhitened, expected)


def test_rows_do_not_see_one_another():
    """The same row gives the same returns alone, beside others, and with masked columns around it."""
    alone = batch([[0, 2.0, 0, 1.0]], [[1, 1, 0, 1]], values=[[0.1, 0.2, 9.0, 0.3]])
    beside = batch(
        [[5.0, 5.0, 5.0, 5.0, 0], [0, 0, 2.0, 0, 1.0], [0, 0, 0, 0, 0]],
        [[1, 1, 1, 1, 1], [0, 1, 1, 0, 1], [0, 0, 0, 0, 0]],
        values=[[1.0] * 5, [9.0, 0.1, 0.2, 9.0, 0.3], [9.0] * 5],
    )
    params = AdvantageParams(gamma=0.9, lam=0.8)
    expected = get_advantage("gae")(alone, params).returns
    torch.testing.assert_close(get_advantage("gae")(beside, params).returns[6:10], expected)


@pytest.mark.parametrize("name", ZERO_VARIANCE_ESTIMATORS)
def test_an_equal_group_among_others_is_zero_and_may_be_left_out(name):
    scores, group = [1.0, 0.0, 0.25, 0.7, 0.7, 0.7, 0.0, 2.0], [0, 0, 0, 1, 1, 1, 2, 2]
    found = get_advantage(name)(one_token_rows(scores, group), AdvantageParams()).advantages
    assert found[3:6].tolist() == [0.0] * 3
    kept = [i for i, number in enumerate(group) if number != 1]
    alone = one_token_rows([scores[i] for i in kept], [group[i] for i in kept])
    scale = 8 / 5 if name == "gpg" else 1.0  # makes up for rows without a gradient
    torch.testing.assert_close(found[kept], get_advantage(name)(alone, AdvantageParams()).advantages * scale)


def test_group_of_one_keeps_its_score():
    for name in OVER_GROUPS:
        outputs = get_advantage(name)(one_token_rows([0.5, 2.0], [0, 1]), AdvantageParams())
        torch.testing.assert_close(outputs.advantages, torch.tensor([0.5, 2.0]))


def test_dr_grpo_leaves_the_spread_in():
    outputs = get_advantage("grpo")(one_token_rows([0.0, 4.0]), AdvantageParams(norm_adv_by_std=False))
    assert outputs.advantages.tolist() == [-2.0, 2.0]


@pytest.mark.parametrize("name", known_advantages())
def test_batch_without_sampled_tokens_gives_zeros(name):
    outputs = get_advantage(name)(with_everything(torch.zeros(4, dtype=torch.bool), [0, 4, 4]), AdvantageParams())
    assert outputs.advantages.tolist() == outputs.returns.tolist() == [0.0] * 4


@pytest.mark.parametrize("name", known_advantages())
def test_batch_without_rows_gives_nothing(name):
    outputs = get_advantage(name)(with_everything(torch.zeros(0, dtype=torch.bool), [0]), AdvantageParams())
    assert outputs.advantages.numel() == outputs.returns.numel() == 0


def test_gae_is_fast_on_long_rows():
    """1024 rows of 2048 tokens take about 0.05 s of CPU time; a loop over tokens or rows takes seconds."""
    mask = torch.ones(1024 * 2048, dtype=torch.bool)
    inputs = AdvantageInputs(
        token_level_rewards=torch.rand(mask.shape),
        mask=mask,
        group=torch.arange(1024),
        offsets=torch.arange(1025) * 2048,
        values=torch.rand(mask.shape),
    )
    taken = []
    for _ in range(3):
        start = time.process_time()
        get_advantage("gae")(inputs, AdvantageParams(gamma=0.99, lam=0.95))
        taken.append(time.process_time() - start)
    assert min(taken) < 0.25
