"""Overlong punishment and masking, reward clipping, groups without variance."""

import math

import pytest
import torch

from vrl.algorithms.reward_shaping import clip_rewards, mask_rows, overlong_penalty, zero_variance_rows


def test_overlong_penalty_is_linear_in_the_buffer():
    lengths = torch.tensor([0, 80, 81, 90, 100, 150])
    penalty = overlong_penalty(lengths, max_length=100, buffer=20, penalty_factor=2.0)
    torch.testing.assert_close(penalty, torch.tensor([0.0, 0.0, -0.1, -1.0, -2.0, -2.0]))
    assert overlong_penalty(lengths, 100, 100, 1.0).tolist()[:2] == pytest.approx([0.0, -0.8])


@pytest.mark.parametrize("buffer", [0, -3, 101])
def test_overlong_buffer_outside_the_length_is_refused(buffer):
    with pytest.raises(ValueError, match=r"overlong_buffer.len must lie between 1 and max_resp_len=100, got"):
        overlong_penalty(torch.tensor([5]), 100, buffer, 1.0)


def test_negative_penalty_factor_is_refused():
    with pytest.raises(ValueError, match="penalty_factor must not be negative, got -1"):
        overlong_penalty(torch.tensor([5]), 100, 10, -1.0)


def test_rewards_are_clipped_and_nan_stays():
    clipped = clip_rewards(torch.tensor([-9.0, -1.0, 0.5, math.inf, math.nan]), -5.0, 5.0)
    assert clipped[:4].tolist() == [-5.0, -1.0, 0.5, 5.0]
    assert math.isnan(clipped[4])
    with pytest.raises(ValueError, match=r"got 1.0 and 1.0"):
        clip_rewards(torch.zeros(1), 1.0, 1.0)


def test_zero_variance_rows_are_those_of_equal_groups_of_two_or_more():
    group = torch.tensor([5, 5, 9, 2, 5, 2, 7, 7])
    scores = torch.tensor([0.7, 0.7, 0.7, 0.0, 0.7, 1.0, math.nan, math.nan])
    assert zero_variance_rows(scores, group).tolist() == [True, True, False, False, True, False, False, False]
    seven = torch.full((7,), 0.7)
    assert zero_variance_rows(seven, torch.zeros(7, dtype=torch.int64)).all()
    assert zero_variance_rows(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_masked_rows_lose_their_tokens_and_no_others():
    mask = torch.tensor([True, False, True, True, True, False])
    offsets = torch.tensor([0, 3, 3, 5, 6])
    kept = mask_rows(mask, torch.tensor([False, True, True, False]), offsets)
    assert kept.tolist() == [True, False, True, False, False, False]
    assert mask.tolist() == [True, False, True, True, True, False]
