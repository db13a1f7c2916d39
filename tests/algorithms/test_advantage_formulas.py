"""Every advantage estimator against slow float64 loops on random rows, and the requirements on groups and returns."""

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageParams, get_advantage, known_advantages
from vrl.algorithms.metrics import equal_group_share
from vrl.algorithms.padded import from_padded, to_padded
from vrl.algorithms.segments import place_on_last_sampled

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


def one_token_rows(scores, group=None, dtype=torch.float32):
    return batch([[s] for s in scores], [[1]] * len(scores), group or [0] * len(scores), dtype=dtype)


@st.composite
def ragged_batches(draw):
    """Random rows in float64: gaps, empty rows, groups in any order, garbage values where nothing was sampled."""
    masks = draw(st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=6))
    group = [draw(st.integers(-2, 2)) for _ in masks]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    mask = torch.tensor([m for row in masks for m in row], dtype=torch.bool)
    offsets = torch.tensor([0, *(len(row) for row in masks)]).cumsum(0)
    scores = torch.tensor([draw(st.sampled_from([0.0, 0.7, 1.0, -0.3])) for _ in masks], dtype=torch.float64)
    rewards = place_on_last_sampled(scores, mask, offsets)
    if draw(st.booleans()):
        rewards = rewards + torch.randn(mask.shape, generator=generator, dtype=torch.float64)  # also off the mask
    values = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    return AdvantageInputs(
        token_level_rewards=rewards,
        mask=mask,
        group=torch.tensor(group),
        offsets=offsets,
        values=torch.where(mask, values, math.nan),
        reward_baselines=torch.randn(len(masks), generator=generator, dtype=torch.float64),
    )


def rows_of(inputs):
    """Per row: (flat index, reward, value) of its sampled tokens; a stray reward goes to the sampled token before."""
    rows = []
    for start, end in zip(inputs.offsets[:-1].tolist(), inputs.offsets[1:].tolist(), strict=True):
        row = []
        for t in range(start, end):
            reward = inputs.token_level_rewards[t].item()
            if inputs.mask[t]:
                row.append([t, reward, inputs.values[t].item()])
            elif row:
                row[-1][1] += reward
        rows.append(row)
    return rows


def mean(xs):
    return sum(xs) / len(xs)


def whitened(per_token):
    """{flat index: value} whitened over its values."""
    xs = list(per_token.values())
    if len(xs) < 2:
        return dict.fromkeys(per_token, 0.0)
    variance = sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1)
    return {t: (x - mean(xs)) / math.sqrt(variance + 1e-8) for t, x in per_token.items()}


def slow_gae(inputs, params):
    advantages, returns = {}, {}
    for row in rows_of(inputs):
        later, next_value = 0.0, 0.0
        for t, reward, value in reversed(row):
            later = reward + params.gamma * next_value - value + params.gamma * params.lam * later
            next_value = value
            advantages[t], returns[t] = later, later + value
    return whitened(advantages), returns


def slow_returns(inputs, gamma):
    returns = {}
    for row in rows_of(inputs):
        later = 0.0
        for t, reward, _ in reversed(row):
            later = reward + gamma * later
            returns[t] = later
    return returns


def slow_groups(inputs):
    """Per row: its score, length in sampled tokens, and the rows of its group."""
    scores, lengths = [], []
    for start, end in zip(inputs.offsets[:-1].tolist(), inputs.offsets[1:].tolist(), strict=True):
        scores.append(sum(inputs.token_level_rewards[start:end].tolist()))
        lengths.append(int(inputs.mask[start:end].sum()))
    members = [[j for j, other in enumerate(inputs.group) if other == g] for g in inputs.group]
    return scores, lengths, members


def slow_row_advantages(name, inputs, params):
    scores, lengths, members = slow_groups(inputs)
    out = []
    for i, group in enumerate(members):
        alone, s = len(group) == 1, [scores[j] for j in group]
        base = 0.0 if alone else mean(s)
        std = 1.0 if alone else math.sqrt(sum((x - mean(s)) ** 2 for x in s) / (len(s) - 1))
        if name == "grpo":
            out.append((scores[i] - base) / ((std + params.eps) if params.norm_adv_by_std else 1.0))
        elif name == "rloo":
            others = [scores[j] for j in group if j != i]
            out.append(scores[i] - (mean(others) if others else 0.0))
        elif name == "opo":
            total = sum(lengths[j] for j in group)
            weighted = sum(lengths[j] * scores[j] for j in group) / total if total else 0.0
            out.append(scores[i] - (0.0 if alone else weighted))
        elif name in ("gpg", "reinforce_plus_plus_baseline"):
            out.append(scores[i] - base)
        else:
            best, second = sorted(s)[-1], sorted(s)[-2]
            lead = (best - second) / ((std + params.eps) if params.norm_adv_by_std else 1.0)
            out.append(lead if i == max(group, key=scores.__getitem__) else 0.0)
    if name == "gpg":
        still = [all(abs(out[j]) < 1e-12 for j in group) for group in members]
        out = [x * len(out) / max(still.count(False), 1) for x in out]
    return out


def slow(name, inputs, params):
    """(advantages, returns) of every sampled token, by loops."""
    if name == "gae":
        return slow_gae(inputs, params)
    if name == "reinforce_plus_plus":
        returns = slow_returns(inputs, params.gamma)
        return whitened(returns), returns
    if name == "remax":
        returns = slow_returns(inputs, 1.0)
        owner = {t: i for i, row in enumerate(rows_of(inputs)) for t, _, _ in row}
        return {t: g - inputs.reward_baselines[owner[t]].item() for t, g in returns.items()}, returns
    per_row = slow_row_advantages(name, inputs, params)
    advantages = {t: per_row[i] for i, row in enumerate(rows_of(inputs)) for t, _, _ in row}
    advantages = whitened(advantages) if name == "reinforce_plus_plus_baseline" else advantages
    return advantages, advantages


def dense(per_token, total):
    out = torch.zeros(total, dtype=torch.float64)
    for t, value in per_token.items():
        out[t] = value
    return out


@pytest.mark.parametrize("name", known_advantages())
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    inputs=ragged_batches(),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
    norm=st.booleans(),
)
def test_estimator_equals_slow_loops(name, inputs, gamma, lam, norm):
    params = AdvantageParams(gamma=gamma, lam=lam, norm_adv_by_std=norm)
    if name == "grpo_passk" and any(inputs.group.tolist().count(g) == 1 for g in inputs.group.tolist()):
        with pytest.raises(ValueError, match="at least 2 rows"):
            get_advantage(name)(inputs, params)
        return
    outputs = get_advantage(name)(inputs, params)
    advantages, returns = slow(name, inputs, params)
    torch.testing.assert_close(outputs.advantages, dense(advantages, inputs.mask.numel()), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(outputs.returns, dense(returns, inputs.mask.numel()), rtol=1e-8, atol=1e-8)


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


def test_group_of_one_keeps_its_score():
    for name in OVER_GROUPS:
        outputs = get_advantage(name)(one_token_rows([0.5, 2.0], [0, 1]), AdvantageParams())
        torch.testing.assert_close(outputs.advantages, torch.tensor([0.5, 2.0]))


def test_dr_grpo_leaves_the_spread_in():
    outputs = get_advantage("grpo")(one_token_rows([0.0, 4.0]), AdvantageParams(norm_adv_by_std=False))
    assert outputs.advantages.tolist() == [-2.0, 2.0]


@pytest.mark.parametrize("name", known_advantages())
def test_batch_without_sampled_tokens_gives_zeros(name):
    inputs = AdvantageInputs(
        token_level_rewards=torch.zeros(4),
        mask=torch.zeros(4, dtype=torch.bool),
        group=torch.tensor([0, 0]),
        offsets=torch.tensor([0, 4, 4]),
        values=torch.full((4,), math.nan),
        reward_baselines=torch.ones(2),
    )
    outputs = get_advantage(name)(inputs, AdvantageParams())
    assert outputs.advantages.tolist() == outputs.returns.tolist() == [0.0] * 4


@pytest.mark.parametrize("name", sorted(set(known_advantages()) - {"gae", "remax"}))
def test_batch_without_rows_gives_nothing(name):
    inputs = AdvantageInputs(
        token_level_rewards=torch.zeros(0),
        mask=torch.zeros(0, dtype=torch.bool),
        group=torch.zeros(0, dtype=torch.int64),
        offsets=torch.tensor([0]),
    )
    assert get_advantage(name)(inputs, AdvantageParams()).advantages.numel() == 0


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
