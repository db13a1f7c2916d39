"""KL estimators on far-off tokens and masked garbage, KL in the reward, and the controllers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vrl.algorithms.kl import KL_ESTIMATORS, AdaptiveKl, FixedKl, kl_estimate, kl_in_reward, sequence_mean_kl

ALL = torch.tensor([True])


def estimate(log_prob, ref, estimator, dtype=torch.float32):
    log_probs = torch.tensor([log_prob], dtype=dtype, requires_grad=True)
    value = kl_estimate(log_probs, torch.tensor([ref], dtype=dtype), ALL, estimator)
    value.sum().backward()
    return value.item(), log_probs.grad.item()


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("log_prob", "ref"), [(-130.0, 0.0), (0.0, -130.0)])
def test_rb1_gap_of_130_is_finite(estimator, dtype, log_prob, ref):
    assert all(math.isfinite(number) for number in estimate(log_prob, ref, estimator, dtype))


@pytest.mark.parametrize(
    ("log_prob", "ref", "k1", "k2", "k3"), [(-1.0, -1.5, 0.5, 0.125, 0.10653), (-1.5, -1.0, -0.5, 0.125, 0.14872)]
)
def test_rb1_usual_values(log_prob, ref, k1, k2, k3):
    expected = {"kl": k1, "k1": k1, "abs": abs(k1), "mse": k2, "k2": k2, "low_var_kl": k3, "k3": k3}
    for name, value in expected.items():
        assert math.isclose(estimate(log_prob, ref, name)[0], value, abs_tol=1e-5)
        straight = estimate(log_prob, ref, name + "+")
        assert math.isclose(straight[0], value, abs_tol=1e-5)
        assert math.isclose(straight[1], log_prob - ref, abs_tol=1e-6)  # the gradient of k2


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_rb1_nan_is_not_hidden(estimator):
    assert math.isnan(estimate(math.nan, -1.0, estimator)[0])


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_garbage_on_masked_tokens_does_not_leak(estimator):
    for garbage in (math.nan, math.inf, -math.inf):
        log_probs = torch.tensor([-1.0, garbage], requires_grad=True)
        value = kl_estimate(log_probs, torch.tensor([-1.5, garbage]), torch.tensor([True, False]), estimator)
        value.sum().backward()
        assert torch.isfinite(value).all()
        assert value[1] == 0.0
        assert torch.isfinite(log_probs.grad).all()
        assert log_probs.grad[1] == 0.0


@settings(max_examples=30, deadline=None, derandomize=True)
@given(log_prob=st.floats(-30, 0), ref=st.floats(-30, 0))
def test_k3_is_never_negative(log_prob, ref):
    assert estimate(log_prob, ref, "k3", torch.float64)[0] >= -1e-12


def test_kl_in_reward_touches_sampled_tokens_only():
    scores = torch.tensor([0.0, 0.0, 1.0])
    kl = torch.tensor([0.5, math.nan, 2.0])
    rewards = kl_in_reward(scores, kl, torch.tensor([True, False, True]), beta=0.1)
    torch.testing.assert_close(rewards, torch.tensor([-0.05, 0.0, 0.8]))


def test_sequence_mean_kl_leaves_empty_rows_out():
    kl = torch.tensor([1.0, 3.0, math.nan, 5.0, math.nan])
    mask = torch.tensor([1, 1, 0, 1, 0]).bool()
    assert sequence_mean_kl(kl, mask, torch.tensor([0, 3, 4, 5])) == (2.0 + 5.0) / 2
    assert sequence_mean_kl(kl, torch.zeros(5, dtype=torch.bool), torch.tensor([0, 5])) == 0.0


def test_fixed_controller_stays():
    assert FixedKl(0.001).updated(9.0, 512) == FixedKl(0.001)


def test_adaptive_controller_survives_a_kl_that_is_not_finite():
    controller = AdaptiveKl(beta=0.2, target_kl=0.1, horizon=10000)
    assert controller.updated(math.nan, 512) == controller
    assert controller.updated(math.inf, 512) == controller


@pytest.mark.parametrize(("target_kl", "horizon"), [(0.0, 100), (-1.0, 100), (0.1, 0)])
def test_adaptive_controller_refuses_impossible_settings(target_kl, horizon):
    with pytest.raises(ValueError, match="kl_ctrl"):
        AdaptiveKl(beta=0.1, target_kl=target_kl, horizon=horizon)
