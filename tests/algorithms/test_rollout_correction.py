"""Rollout correction: against plain loops on random ragged rows, and its corner cases. Golden values: another file."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vrl.algorithms.rollout_correction import (
    REJECTION_STATISTICS,
    RolloutCorrectionParams,
    mismatch_metrics,
    rollout_correction,
)


@st.composite
def two_policies(draw):
    """old and rollout log-probs, mask, offsets; garbage wherever nothing was sampled."""
    masks = draw(st.lists(st.lists(st.booleans(), max_size=7), min_size=1, max_size=5))
    mask = torch.tensor([m for row in masks for m in row], dtype=torch.bool)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    scale = draw(st.sampled_from([0.01, 0.5, 30.0]))
    old = -torch.randn(mask.shape, generator=generator).abs()
    rollout = old + scale * torch.randn(mask.shape, generator=generator)
    garbage = draw(st.sampled_from([math.nan, math.inf, 1e30]))
    offsets = torch.tensor([0, *(len(row) for row in masks)]).cumsum(0)
    return torch.where(mask, old, garbage), torch.where(mask, rollout, -garbage), mask, offsets


def sampled_by_row(mask, offsets):
    return [[t for t in range(a, b) if mask[t]] for a, b in itertools.pairwise(offsets.tolist())]


def exp(x):
    return math.exp(min(max(x, -20.0), 20.0))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    batch=two_policies(),
    level=st.sampled_from(["token", "sequence"]),
    threshold=st.sampled_from([2.0, "2.0", "0.5_3.0"]),
    normalise=st.booleans(),
)
def test_weights_equal_slow_loops(batch, level, threshold, normalise):
    old, rollout, mask, offsets = batch
    expected, of_rows = [0.0] * mask.numel(), []
    for at in sampled_by_row(mask, offsets):
        gaps = [old[t].item() - rollout[t].item() for t in at]
        ratios = [exp(sum(gaps))] * len(at) if level == "sequence" else [exp(gap) for gap in gaps]
        for t, ratio in zip(at, ratios, strict=True):
            inside = threshold != "0.5_3.0" or 0.5 <= ratio <= 3.0
            expected[t] = min(ratio, 3.0 if threshold == "0.5_3.0" else 2.0) * inside
        of_rows += [expected[at[0]]] if at else []
    units = of_rows if level == "sequence" else [expected[t] for t in range(len(expected)) if mask[t]]
    mean = sum(units) / max(len(units), 1)
    if normalise and mean > 1e-8:
        expected = [weight / mean for weight in expected]
    params = RolloutCorrectionParams(
        rollout_is=level, rollout_is_threshold=threshold, rollout_is_batch_normalize=normalise
    )
    result = rollout_correction(old, rollout, mask, offsets, params)
    torch.testing.assert_close(result.weights, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert torch.equal(result.mask, mask)
    assert all(math.isfinite(x) for x in result.metrics.values())


@pytest.mark.parametrize("name", REJECTION_STATISTICS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(batch=two_policies(), high=st.sampled_from([1.02, 1.5, 4.0]))
def test_rejection_equals_slow_loops(name, batch, high):
    old, rollout, mask, offsets = batch
    level, estimator = name.rsplit("_", 1)
    low, high_value = (-math.log(high), math.log(high)) if estimator == "k1" else (-math.inf, high)
    expected = [False] * mask.numel()
    for at in sampled_by_row(mask, offsets):
        gaps = [old[t].item() - rollout[t].item() for t in at]
        k = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: exp(x) - 1 - min(max(x, -20.0), 20.0)}
        values = [k[estimator](gap) for gap in gaps]
        if level != "token" and at:
            whole = {"seq_sum": sum, "seq_mean": lambda v: sum(v) / len(v), "seq_max": max}[level](values)
            values = [whole] * len(at)
        for t, value in zip(at, values, strict=True):
            expected[t] = low <= value <= high_value
    params = RolloutCorrectionParams(rollout_rs=name, rollout_rs_threshold=high)
    result = rollout_correction(old, rollout, mask, offsets, params)
    assert result.mask.tolist() == expected
    assert result.weights is None
    sampled = int(mask.sum())
    if sampled:
        lost = (sampled - sum(expected)) / sampled
        assert math.isclose(result.metrics["rollout_rs_masked_fraction"], lost, abs_tol=1e-12)
    assert all(math.isfinite(x) for x in result.metrics.values())


def one_row(gaps):
    old = torch.full((len(gaps),), -1.0)
    return old, old - torch.tensor(gaps), torch.ones(len(gaps), dtype=torch.bool), torch.tensor([0, len(gaps)])


def test_same_policies_have_weight_one_and_no_mismatch():
    params = RolloutCorrectionParams(
        rollout_is="token", rollout_rs="token_k1,seq_max_k3", rollout_rs_threshold="1.1,0.1"
    )
    result = rollout_correction(*one_row([0.0, 0.0]), params)
    assert result.weights.tolist() == [1.0, 1.0]
    assert result.mask.tolist() == [True, True]
    for name in ("kl", "k3_kl", "log_ppl_diff", "chi2_token", "chi2_seq", "rollout_rs_masked_fraction"):
        assert result.metrics[name] == 0.0
    assert result.metrics["rollout_is_eff_sample_size"] == 1.0
    assert math.isclose(result.metrics["training_ppl"], math.e, rel_tol=1e-6)


def test_a_batch_without_a_sampled_token_is_no_error():
    nothing = torch.zeros(3, dtype=torch.bool)
    garbage = torch.tensor([math.nan, math.inf, 1.0])
    params = RolloutCorrectionParams(rollout_is="sequence", rollout_rs="seq_max_k2", rollout_rs_threshold=1.0)
    for offsets in (torch.tensor([0, 2, 3]), torch.tensor([0, 0, 3])):
        result = rollout_correction(garbage, garbage, nothing, offsets, params)
        assert result.weights.tolist() == [0.0, 0.0, 0.0]
        assert result.mask.tolist() == [False, False, False]
        assert result.metrics == {}
        assert mismatch_metrics(garbage, garbage, nothing, offsets) == {}
    empty = torch.zeros(0)
    result = rollout_correction(empty, empty, empty.bool(), torch.tensor([0]), params)
    assert (result.weights.numel(), result.metrics) == (0, {})


def test_weights_carry_no_gradient_and_a_nan_is_kept_or_rejected():
    old, rollout, mask, offsets = one_row([0.1, math.nan, 0.1])
    params = RolloutCorrectionParams(rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold=1.0)
    result = rollout_correction(old.requires_grad_(), rollout, mask, offsets, params)
    assert not result.weights.requires_grad
    assert result.weights.isnan().tolist() == [False, True, False]
    assert result.mask.tolist() == [True, False, True]


def test_bounds_of_k1_hold_the_inverse_of_the_importance_ratio():
    """The engine gives the token twice the probability: importance ratio 1/2, k1 = log 2."""
    params = RolloutCorrectionParams(rollout_rs="token_k1", rollout_rs_threshold="0.9_2.5")
    assert rollout_correction(*one_row([-math.log(2.0)]), params).mask.tolist() == [True]
    assert rollout_correction(*one_row([math.log(2.0)]), params).mask.tolist() == [False]


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"rollout_is": "row"}, "unknown rollout_correction.rollout_is 'row'; known: token, sequence"),
        ({"rollout_is": "token", "rollout_is_threshold": -2.0}, "rollout_is_threshold must be a positive number"),
        ({"rollout_is": "token", "rollout_is_threshold": "1_2_3"}, "rollout_is_threshold must be a positive number"),
        ({"rollout_is": "token", "rollout_is_threshold": "nan"}, "rollout_is_threshold must be a positive number"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2.0}, "unknown statistic 'seq_max_k1'"),
        ({"rollout_rs": "token_k2,token_k3", "rollout_rs_threshold": "1,2,3"}, "2 statistics and .* 3 values"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_1"}, "token_k2 takes one upper bound"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "give u >= 1 or low_high"),
    ],
)
def test_impossible_settings_are_refused(settings_, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionParams(**settings_)
