"""Turn-aware credit by hand: borders from turn ids alone, comparison turn by turn, states, parts of the score."""

import pytest
import torch

from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageParams, get_advantage

NOT_NORMED = AdvantageParams(norm_adv_by_std=False)


def rows(turns, group=None, **more):
    """Inputs from rows of turns, a turn being the rewards of its tokens; one observation token behind each turn."""
    rewards, mask, turn_ids, lengths = [], [], [], []
    for row in turns:
        for k, turn in enumerate(row):
            rewards += [*turn, 0.0]
            mask += [True] * len(turn) + [False]
            turn_ids += [k] * len(turn) + [-1]
        lengths.append(sum(len(turn) + 1 for turn in row))
    return AdvantageInputs(
        token_level_rewards=torch.tensor(rewards),
        mask=torch.tensor(mask),
        group=torch.tensor(group if group is not None else [0] * len(turns)),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        turn_ids=torch.tensor(turn_ids),
        **more,
    )


def of_sampled(inputs, x):
    return x[inputs.mask].tolist()


def test_grpo_turn_compares_turns_of_one_index():
    inputs = rows([[[0, 1.0], [2.0]], [[3.0], [0, 0.0]]])
    outputs = get_advantage("grpo_turn")(inputs, AdvantageParams(gamma=0.5, norm_adv_by_std=False))
    assert of_sampled(inputs, outputs.returns) == [2.0, 2.0, 2.0, 3.0, 0.0, 0.0]
    assert of_sampled(inputs, outputs.advantages) == [-0.5, -0.5, 1.0, 0.5, -1.0, -1.0]


def test_grpo_turn_falls_back_to_all_turns_where_one_row_goes_on():
    inputs = rows([[[1.0], [4.0]], [[1.0]]])  # returns 5 and 4, and 1
    outputs = get_advantage("grpo_turn")(inputs, NOT_NORMED)
    torch.testing.assert_close(outputs.advantages[inputs.mask], torch.tensor([2.0, 4 - 10 / 3, -2.0]))
    over_all = get_advantage("grpo_turn")(inputs, AdvantageParams(norm_adv_by_std=False, over_all_turns=True))
    torch.testing.assert_close(over_all.advantages[inputs.mask], torch.tensor([5.0, 4.0, 1.0]) - 10 / 3)


def test_grpo_turn_gives_exactly_zero_for_equal_returns():
    inputs = rows([[[0.0], [0.7]]] * 7)
    assert set(of_sampled(inputs, get_advantage("grpo_turn")(inputs, AdvantageParams()).advantages)) == {0.0}


def test_grpo_turn_with_one_turn_a_row_is_grpo():
    inputs = rows([[[0, 0.7]], [[0.3]], [[0, 0, 1.0]], [[5.0]]], group=[0, 0, 0, 1])
    by_turn = get_advantage("grpo_turn")(inputs, AdvantageParams(gamma=0.9))
    by_row = get_advantage("grpo")(inputs, AdvantageParams())
    assert torch.equal(by_turn.advantages, by_row.advantages)


def test_bi_level_gae_takes_borders_from_turn_ids():
    """The first turn has reward 0 and still gets its own advantage, discounted once per turn."""
    inputs = rows([[[0, 0.0], [0, 1.0]]], values=torch.zeros(6))
    params = AdvantageParams(gamma=0.5, lam=1.0, high_level_gamma=0.8)
    outputs = get_advantage("bi_level_gae")(inputs, params)
    torch.testing.assert_close(outputs.returns[inputs.mask], torch.tensor([0.4, 0.8, 0.5, 1.0]))


def test_bi_level_gae_does_not_end_with_the_last_reward():
    """A last turn without a reward is a turn: its value of 0.5 reaches the turn before."""
    inputs = rows([[[1.0], [0.0]]], values=torch.tensor([0.0, 9.0, 0.5, 9.0]))
    outputs = get_advantage("bi_level_gae")(inputs, AdvantageParams(high_level_gamma=0.8, lam=0.5))
    torch.testing.assert_close(outputs.returns[inputs.mask], torch.tensor([1.0 + 0.4 - 0.4 * 0.5, 0.0]))


def test_bi_level_gae_with_one_turn_a_row_is_gae():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(11, generator=generator)
    inputs = rows([[[0.5, 0, 1.0]], [[2.0]], [[0, 0, -1.0, 0]]], values=values)
    params = AdvantageParams(gamma=0.9, lam=0.8, high_level_gamma=0.5)
    two, one = get_advantage("bi_level_gae")(inputs, params), get_advantage("gae")(inputs, params)
    torch.testing.assert_close(two.advantages, one.advantages)
    torch.testing.assert_close(two.returns, one.returns)


def test_gigpo_compares_turns_from_the_same_state():
    """Row 0 comes back to the state that it started from, and the row of the other group never counts."""
    states = torch.tensor([4, -1, 5, -1, 4, -1, 4, -1, 4, -1])
    inputs = rows([[[0.0], [0.0], [1.0]], [[0.0]], [[9.0]]], group=[0, 0, 1], state_ids=states)
    outputs = get_advantage("gigpo")(inputs, AdvantageParams(gamma=0.5, norm_adv_by_std=False, step_advantage_w=2.0))
    mean = (0.25 + 1.0 + 0.0) / 3
    expected = [0.5 + 2 * (0.25 - mean), 0.5, 0.5 + 2 * (1.0 - mean), -0.5 - 2 * mean, 0.0]
    torch.testing.assert_close(outputs.advantages[inputs.mask], torch.tensor(expected))


def test_gdpo_tells_apart_what_grpo_does_not():
    """Parts (1, 0) and (0, 1) have the same sum; a part that is rarer in its group stands out more."""
    parts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    inputs = rows([[[row.sum().item()]] for row in parts], reward_components=parts)
    assert set(of_sampled(inputs, get_advantage("grpo")(inputs, AdvantageParams()).advantages)) == {0.0}
    weighted = get_advantage("gdpo")(inputs, AdvantageParams(component_weights=(1.0, 0.5))).advantages[inputs.mask]
    torch.testing.assert_close(weighted, torch.tensor([1.5, -0.5, -0.5, -0.5]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("values", [[0.7] * 7, [0.1 + 0.2] * 3])
def test_gdpo_gives_exactly_zero_for_equal_parts(values):
    parts = torch.tensor([[x, x] for x in values])
    inputs = rows([[[x]] for x in values], reward_components=parts)
    assert set(of_sampled(inputs, get_advantage("gdpo")(inputs, AdvantageParams()).advantages)) == {0.0}


def test_optimal_token_baseline_by_hand():
    """Squared norms 1 - 2 pi + sum pi^2 of 0.5 and 1.5; row 1 alone goes on to the second token."""
    log_pi = torch.tensor([0.5, 0.0, 0.25, 0.25, 0.0]).log().nan_to_num(neginf=0.0)
    sums = torch.tensor([0.5, 0.0, 1.0, 0.5, 0.0])
    inputs = rows([[[1.0]], [[0, 5.0]]], old_log_probs=log_pi, sum_pi_squared=sums)
    outputs = get_advantage("optimal_token_baseline")(inputs, AdvantageParams())
    baseline = (1.0 * 0.5 + 5.0 * 1.5) / 2.0
    torch.testing.assert_close(outputs.advantages[inputs.mask], torch.tensor([1.0 - baseline, 5.0 - baseline, 5.0]))


def test_optimal_token_baseline_gives_exactly_zero_for_equal_returns():
    log_pi, sums = torch.full((14,), -0.3), torch.full((14,), 0.6)
    inputs = rows([[[0.7]]] * 7, old_log_probs=log_pi, sum_pi_squared=sums)
    outputs = get_advantage("optimal_token_baseline")(inputs, AdvantageParams())
    assert set(of_sampled(inputs, outputs.advantages)) == {0.0}
