"""Learning-rate factors at their corners, explained variance by hand."""

import math

import pytest
import torch

from vrl.algorithms.metrics import explained_variance
from vrl.algorithms.schedules import constant_factor, cosine_factor


def test_constant_with_and_without_warm_up():
    assert [constant_factor(step) for step in (0, 1, 100)] == [1.0, 1.0, 1.0]
    assert [constant_factor(step, warmup_steps=4) for step in (0, 1, 4, 5)] == [0.0, 0.25, 1.0, 1.0]


@pytest.mark.parametrize(("step", "factor"), [(0, 0.0), (1, 0.5), (2, 1.0), (6, 0.5), (10, 0.0), (99, 0.0)])
def test_cosine_with_warm_up(step, factor):
    assert math.isclose(cosine_factor(step, warmup_steps=2, total_steps=10), factor, abs_tol=1e-12)


@pytest.mark.parametrize(("step", "factor"), [(0, 1.0), (5, 0.0), (10, 1.0), (15, 0.0), (20, 1.0), (99, 1.0)])
def test_cosine_with_two_whole_waves(step, factor):
    actual = cosine_factor(step, warmup_steps=0, total_steps=20, num_cycles=2.0)
    assert math.isclose(actual, factor, abs_tol=1e-12)


def test_cosine_keeps_the_smallest_ratio():
    factors = [cosine_factor(step, warmup_steps=2, total_steps=10, min_lr_ratio=0.1) for step in range(15)]
    assert math.isclose(factors[0], 0.1)
    assert factors[2] == 1.0
    assert math.isclose(factors[6], 0.55)  # half way down
    assert all(math.isclose(factor, 0.1) for factor in factors[10:])  # does not rise again
    assert min(factors) >= 0.1 - 1e-12


def test_cosine_refuses_an_impossible_ratio():
    with pytest.raises(ValueError, match="min_lr_ratio must lie between 0 and 1"):
        cosine_factor(0, warmup_steps=0, total_steps=1, min_lr_ratio=1.5)


def test_explained_variance():
    returns = torch.tensor([1.0, 2.0, 3.0, math.nan])
    mask = torch.tensor([True, True, True, False])
    assert math.isclose(explained_variance(returns, returns, mask), 1.0)
    assert math.isclose(explained_variance(returns + 5.0, returns, mask), 1.0)  # a constant offset explains as much
    assert math.isclose(explained_variance(torch.zeros(4), returns, mask), 0.0, abs_tol=1e-4)
    assert math.isclose(explained_variance(-returns, returns, mask), 1.0 - 4.0, rel_tol=1e-4)


def test_explained_variance_of_a_single_token_is_zero_not_nan():
    assert explained_variance(torch.ones(2), torch.ones(2), torch.tensor([True, False])) == 0.0
