"""Aggregation: one division by global counts, however the mini-batch is cut into micro-batches and ranks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vrl.algorithms.aggregation import AGGREGATION_MODES, Counts, aggregate, counts, token_sums
from vrl.algorithms.losses.registry import LossInputs, LossParams, get_policy_loss
from vrl.algorithms.padded import from_padded

NORM_LENGTH = 11.0


def turn_ids_of(mask, offsets):
    """A new turn with every second sampled token of a row, -1 on the others."""
    rows = mask.split(offsets.diff().tolist())
    return torch.cat([torch.where(row, (row.cumsum(0) - 1) // 2, -1) for row in rows]).int()


@st.composite
def cut_batches(draw):
    """Rows (mask lists), where to cut between them, and a seed for the numbers."""
    masks = draw(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=7))
    cuts = sorted(draw(st.sets(st.integers(1, len(masks)), max_size=len(masks))) | {len(masks)})
    return masks, cuts, draw(st.integers(0, 999))


def loss_of(name, log_probs, mask, offsets, mode, total):
    """A real loss on a part; all inputs are functions of the log-prob, so that parts agree with the whole."""
    inputs = LossInputs(
        log_probs=log_probs,
        old_log_probs=log_probs.detach() * 0.9,
        advantages=log_probs.detach().sin(),
        mask=mask,
        offsets=offsets,
    )
    per_token = get_policy_loss(name)(inputs, LossParams()).per_token
    return aggregate(per_token, mask, offsets, mode, total, NORM_LENGTH, turn_ids_of(mask, offsets))


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(cut=cut_batches(), name=st.sampled_from(["vanilla", "gspo", "geo_mean"]))
def test_rb3_loss_and_gradient_do_not_depend_on_the_cut(mode, cut, name):
    masks, cuts, seed = cut
    lengths = torch.tensor([len(row) for row in masks])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    mask = torch.tensor([m for row in masks for m in row], dtype=torch.bool)
    numbers = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    whole, parts = numbers.clone().requires_grad_(), numbers.clone().requires_grad_()
    total = counts(mask, offsets)

    loss = loss_of(name, whole, mask, offsets, mode, total)
    loss.backward()

    summed, added, first = 0.0, Counts(0, 0), 0
    for last in cuts:
        rows = slice(int(offsets[first]), int(offsets[last]))
        part_offsets = offsets[first : last + 1] - offsets[first]
        part = loss_of(name, parts[rows], mask[rows], part_offsets, mode, total)
        part.backward()
        summed += part.item()
        added = added + counts(mask[rows], part_offsets)
        first = last

    assert added == total
    assert math.isclose(summed, loss.item(), rel_tol=1e-12, abs_tol=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-10, atol=1e-12)


def test_rb3_example():
    """One token with loss 1 and three with loss 0 give 0.25."""
    per_token = torch.tensor([1.0, 0.0, 0.0, 0.0])
    mask, offsets = torch.ones(4, dtype=torch.bool), torch.tensor([0, 1, 4])
    assert aggregate(per_token, mask, offsets, "token-mean", counts(mask, offsets)).item() == 0.25


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_rb4_loss_does_not_depend_on_the_padded_width(mode):
    values = []
    for width in (3, 8):
        per_token = torch.zeros(2, width)
        mask = torch.zeros(2, width, dtype=torch.bool)
        per_token[:, :3] = torch.tensor([[1.0, 2.0, 9.0], [4.0, 5.0, 6.0]])
        mask[:, :3] = torch.tensor([[True, True, False], [True, True, True]])
        flat, offsets = from_padded(per_token)
        flat_mask = mask.reshape(-1)
        total, turn_ids = counts(flat_mask, offsets), turn_ids_of(flat_mask, offsets)
        values.append(aggregate(flat, flat_mask, offsets, mode, total, NORM_LENGTH, turn_ids))
    assert math.isclose(values[0], values[1], rel_tol=1e-6)


def test_modes_by_hand():
    per_token = torch.tensor([1.0, 2.0, 9.0, 4.0, 5.0, 6.0, 7.0])
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool()
    turn_ids = torch.tensor([0, 0, -1, 0, 2, 2, 3])
    offsets = torch.tensor([0, 3, 6, 7])  # the last row has no sampled token
    expected = {
        "token-mean": 18 / 5,
        "token-sum": 18.0,
        "seq-mean-token-sum": (3 + 15) / 2,
        "seq-mean-token-sum-norm": (3 + 15) / 2 / 10,
        "seq-mean-token-mean": (1.5 + 5) / 2,
        "seq-mean-turn-mean-token-mean": (1.5 + (4 + 5.5) / 2) / 2,
    }
    assert set(expected) == set(AGGREGATION_MODES)
    for mode, value in expected.items():
        total = counts(mask, offsets)
        assert total == Counts(tokens=5, sequences=2)
        assert math.isclose(aggregate(per_token, mask, offsets, mode, total, 10.0, turn_ids), value, rel_tol=1e-6)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("total", [Counts(0, 0), Counts(7, 3)])
def test_rb5_part_without_trainable_token_is_zero(mode, total):
    per_token = torch.tensor([math.nan, math.inf, 1.0], requires_grad=True)
    mask, offsets = torch.zeros(3, dtype=torch.bool), torch.tensor([0, 0, 3])
    loss = aggregate(per_token, mask, offsets, mode, total, NORM_LENGTH, turn_ids=torch.tensor([-1, 7, 0]))
    loss.backward()
    assert loss.item() == 0.0
    assert per_token.grad.tolist() == [0.0, 0.0, 0.0]
    sums = token_sums({"ppo_kl": per_token}, mask)
    assert sums["ppo_kl"].item() == 0.0


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_part_without_tokens_is_zero_and_has_a_graph(mode):
    per_token = torch.zeros(0, requires_grad=True)
    mask, offsets = torch.zeros(0, dtype=torch.bool), torch.tensor([0])
    no_turns = torch.zeros(0, dtype=torch.int32)
    loss = aggregate(per_token, mask, offsets, mode, Counts(7, 3), NORM_LENGTH, no_turns)
    loss.backward()
    assert loss.item() == 0.0


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_garbage_on_masked_tokens_does_not_leak(mode):
    mask, offsets = torch.tensor([True, False, True]), torch.tensor([0, 2, 3])
    grads = []
    for garbage in (0.0, math.nan, -math.inf):
        per_token = torch.tensor([1.0, garbage, 3.0], requires_grad=True)
        total, turn_ids = counts(mask, offsets), torch.tensor([0, -1, 0])
        aggregate(per_token, mask, offsets, mode, total, NORM_LENGTH, turn_ids).backward()
        grads.append(per_token.grad.tolist())
    assert grads[0] == grads[1] == grads[2]
    assert grads[0][1] == 0.0


def test_bfloat16_is_summed_in_float32():
    per_token = torch.ones(1000, dtype=torch.bfloat16)
    mask, offsets = torch.ones(1000, dtype=torch.bool), torch.tensor([0, 1000])
    assert aggregate(per_token, mask, offsets, "token-sum", counts(mask, offsets)).item() == 1000.0


def test_unknown_mode_and_missing_length_are_refused():
    mask, offsets = torch.ones(1, dtype=torch.bool), torch.tensor([0, 1])
    total = counts(mask, offsets)
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'mean'; known: token-mean"):
        aggregate(torch.ones(1), mask, offsets, "mean", total)
    for length in (None, 0.0):
        with pytest.raises(ValueError, match="loss_scale_factor"):
            aggregate(torch.ones(1), mask, offsets, "seq-mean-token-sum-norm", total, norm_length=length)


def test_a_long_turn_weighs_no_more_than_a_short_one():
    """Turns of 1 and 9 tokens: each gets half the gradient of the row, and the gap inside a turn is no border."""
    mask = torch.tensor([True, False, *[True] * 4, False, *[True] * 5])
    turn_ids = torch.tensor([0, -1, *[1] * 10])
    per_token = torch.zeros(12, requires_grad=True)
    offsets = torch.tensor([0, 12])
    total = counts(mask, offsets)
    aggregate(per_token, mask, offsets, "seq-mean-turn-mean-token-mean", total, turn_ids=turn_ids).backward()
    torch.testing.assert_close(per_token.grad, torch.where(mask, torch.tensor([0.5] + [0.5 / 9] * 11), 0.0))


def test_turn_mean_needs_turn_ids():
    mask, offsets = torch.ones(2, dtype=torch.bool), torch.tensor([0, 2])
    total, mode = counts(mask, offsets), "seq-mean-turn-mean-token-mean"
    with pytest.raises(ValueError, match=f"loss_agg_mode={mode} needs turn_ids"):
        aggregate(torch.ones(2), mask, offsets, mode, total)
    with pytest.raises(ValueError, match=r"row 0 has \[1, 0\]"):
        aggregate(torch.ones(2), mask, offsets, mode, total, turn_ids=torch.tensor([1, 0]))
