"""Every policy loss and the value loss against slow float64 loops, and the requirements on clips, masks and ratios."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vrl.algorithms.aggregation import aggregate, counts, token_sums
from vrl.algorithms.losses.registry import LossInputs, LossParams, get_policy_loss, known_policy_losses
from vrl.algorithms.losses.value_loss import value_loss

GARBAGE = (math.nan, math.inf, -math.inf, 1e30)


def tokens(log_ratios, advantages, mask=None):
    """One row whose old log-probs are -1 and whose ratios are exp(log_ratios)."""
    old = torch.full((len(log_ratios),), -1.0)
    return LossInputs(
        log_probs=(old + torch.tensor(log_ratios, dtype=torch.float32)).requires_grad_(),
        old_log_probs=old,
        advantages=torch.tensor(advantages, dtype=torch.float32),
        mask=torch.tensor(mask if mask is not None else [1] * len(log_ratios)).bool(),
        offsets=torch.tensor([0, len(log_ratios)]),
    )


def token_mean(inputs, outputs):
    return aggregate(outputs.per_token, inputs.mask, inputs.offsets, "token-mean", counts(inputs.mask, inputs.offsets))


@st.composite
def ragged_losses(draw):
    """Random rows in float64, garbage wherever nothing was sampled."""
    masks = draw(st.lists(st.lists(st.booleans(), max_size=7), min_size=1, max_size=5))
    mask = torch.tensor([m for row in masks for m in row], dtype=torch.bool)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    garbage = draw(st.sampled_from(GARBAGE))

    def normal(scale):
        x = torch.randn(mask.shape, generator=generator, dtype=torch.float64) * scale
        return torch.where(mask, x, garbage)

    old = normal(1.0)
    return LossInputs(
        log_probs=(old + normal(draw(st.sampled_from([0.1, 1.0, 12.0])))).requires_grad_(),
        old_log_probs=old,
        advantages=normal(draw(st.sampled_from([0.0, 1.0]))),
        mask=mask,
        offsets=torch.tensor([0, *(len(row) for row in masks)]).cumsum(0),
        rollout_is_weights=normal(1.0).abs() + 0.1 if draw(st.booleans()) else None,
    )


def clip(x, low, high):
    """In torch scalars, with the gradient of the clamp."""
    return x.clamp(low, high)


def slow_token(name, x, old, advantage, p):
    """Loss of one token from 0-dim tensors."""
    ratio = clip(x - old, -20.0, 20.0).exp()
    if name == "vanilla":
        loss = torch.maximum(-advantage * ratio, -advantage * clip(ratio, 1 - p.clip_ratio_low, 1 + p.clip_ratio_high))
        return torch.minimum(loss, -advantage * p.clip_ratio_c) if advantage < 0 else loss
    if name == "cispo":
        return -clip(ratio, 1 - p.clip_ratio_low, 1 + p.clip_ratio_high).detach() * advantage * x
    if name == "sapo":
        tau = p.tau_pos if advantage > 0 else p.tau_neg
        return -advantage * 4.0 / tau / (1.0 + (-tau * (ratio - 1.0)).exp())
    return -advantage * x


def slow_row(name, x, old, advantages, p):
    """Losses of the sampled tokens of one row."""
    if name == "gspo":
        sequence = (x - old).detach().mean()
        ratio = [clip(t - t.detach() + sequence, -math.inf, 10.0).exp() for t in x]
        clipped = [clip(r, 1 - p.clip_ratio_low, 1 + p.clip_ratio_high) for r in ratio]
        return [torch.maximum(-a * r, -a * c) for a, r, c in zip(advantages, ratio, clipped, strict=True)]
    if name == "geo_mean":
        bounded = []
        for t, o, a in zip(x, old, advantages, strict=True):
            held = clip(t - o, -p.clip_ratio_low, p.clip_ratio_high)
            bounded.append(torch.minimum(t - o, held) if a > 0 else torch.maximum(t - o, held) if a < 0 else 0.0 * t)
        return [-advantages.mean() * torch.stack(bounded).mean().exp()] * len(x)
    return [slow_token(name, t, o, a, p) for t, o, a in zip(x, old, advantages, strict=True)]


def slow_loss(name, inputs, log_probs, params):
    """Per-token loss by rows and tokens; 0 where nothing was sampled."""
    out = [torch.zeros((), dtype=torch.float64)] * inputs.mask.numel()
    for start, end in zip(inputs.offsets[:-1].tolist(), inputs.offsets[1:].tolist(), strict=True):
        at = [t for t in range(start, end) if inputs.mask[t]]
        if not at:
            continue
        losses = slow_row(name, log_probs[at], inputs.old_log_probs[at], inputs.advantages[at], params)
        weights = torch.ones(len(at)) if inputs.rollout_is_weights is None else inputs.rollout_is_weights[at]
        if name == "geo_mean":
            weights = torch.full((len(at),), float(weights.log().mean().exp()), dtype=torch.float64)
        for t, loss, weight in zip(at, losses, weights, strict=True):
            out[t] = loss * weight
    return torch.stack(out) if out else torch.zeros(0, dtype=torch.float64)


@pytest.mark.parametrize("name", known_policy_losses())
@settings(max_examples=30, deadline=None, derandomize=True)
@given(inputs=ragged_losses())
def test_policy_loss_equals_slow_loops(name, inputs):
    params = LossParams(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=2.5, tau_pos=1.5, tau_neg=2.0)
    outputs = get_policy_loss(name)(inputs, params)
    outputs.per_token.sum().backward()
    log_probs = inputs.log_probs.detach().clone().requires_grad_()
    expected = slow_loss(name, inputs, log_probs, params)
    torch.testing.assert_close(outputs.per_token.detach(), expected.detach(), rtol=1e-9, atol=1e-9)
    if expected.requires_grad:
        expected.sum().backward()
        torch.testing.assert_close(inputs.log_probs.grad, log_probs.grad, rtol=1e-8, atol=1e-8)
    for values in outputs.metrics.values():
        assert values[~inputs.mask].tolist() == [0.0] * int((~inputs.mask).sum())
        assert not values.requires_grad


@settings(max_examples=30, deadline=None, derandomize=True)
@given(inputs=ragged_losses(), cliprange=st.sampled_from([0.0, 0.2, 5.0]))
def test_value_loss_equals_slow_loops(inputs, cliprange):
    old, returns = inputs.old_log_probs, inputs.advantages
    values = inputs.log_probs
    outputs = value_loss(values, old, returns, inputs.mask, cliprange)
    outputs.per_token.sum().backward()
    expected, grad = [], []
    for t in range(inputs.mask.numel()):
        if not inputs.mask[t]:
            expected.append(0.0)
            grad.append(0.0)
            continue
        v, o, r = values[t].item(), old[t].item(), returns[t].item()
        held = min(max(v, o - cliprange), o + cliprange)
        expected.append(0.5 * max((v - r) ** 2, (held - r) ** 2))
        inside = abs(v - o) <= cliprange
        grad.append(v - r if inside or (v - r) ** 2 > (held - r) ** 2 else 0.0)
    torch.testing.assert_close(outputs.per_token.detach(), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(values.grad, torch.tensor(grad, dtype=torch.float64))


@pytest.mark.parametrize(
    ("advantage", "ratio", "high", "loss"),
    [
        (1, 5, 0.2, -1.2),
        (1, 0.5, 0.2, -0.5),
        (-1, 5, 0.2, 3.0),
        (-1, 2, 0.2, 2.0),
        (-1, 0.5, 0.2, 0.8),
        (2, 10, 0.2, -2.4),
        (-2, 10, 0.2, 6.0),
        (1, 1.5, 0.28, -1.28),
    ],
)
def test_rb2_dual_clip_only_for_negative_advantages(advantage, ratio, high, loss):
    params = LossParams(clip_ratio_low=0.2, clip_ratio_high=high, clip_ratio_c=3.0)
    outputs = get_policy_loss("vanilla")(tokens([math.log(ratio)], [advantage]), params)
    torch.testing.assert_close(outputs.per_token.detach(), torch.tensor([loss]))
    assert outputs.metrics["pg_clipfrac_lower"].tolist() == [float(advantage < 0 and ratio > 3)]


@pytest.mark.parametrize("c", [1.0, 0.5, -3.0])
def test_rb2_dual_clip_bound_up_to_one_is_refused(c):
    with pytest.raises(ValueError, match="clip_ratio_c must be above 1"):
        LossParams(clip_ratio_c=c)


def test_other_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="clip_ratio_low and clip_ratio_high"):
        LossParams(clip_ratio_low=-0.1)
    with pytest.raises(ValueError, match="tau_pos and tau_neg"):
        LossParams(tau_neg=0.0)
    with pytest.raises(ValueError, match="cliprange_value"):
        value_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.ones(1).bool(), -0.5)


@pytest.mark.parametrize("name", known_policy_losses())
def test_rb5_batch_without_trainable_token_is_zero(name):
    inputs = LossInputs(
        log_probs=torch.tensor([math.nan, math.inf, -1.0], requires_grad=True),
        old_log_probs=torch.tensor([math.nan, -1.0, math.inf]),
        advantages=torch.tensor([math.nan, math.inf, 1.0]),
        mask=torch.zeros(3, dtype=torch.bool),
        offsets=torch.tensor([0, 2, 3]),
        rollout_is_weights=torch.tensor([math.nan, 0.0, math.inf]),
    )
    outputs = get_policy_loss(name)(inputs, LossParams())
    loss = token_mean(inputs, outputs)
    loss.backward()
    assert loss.item() == 0.0
    assert inputs.log_probs.grad.tolist() == [0.0, 0.0, 0.0]
    assert all(total.item() == 0.0 for total in token_sums(outputs.metrics, inputs.mask).values())


@pytest.mark.parametrize(("advantages", "loss"), [([2.0, 2.0, 2.0], -2.0), ([0.0, 5.0, 0.0], 0.0)])
def test_rb9_loss_uses_the_mask_and_not_the_advantages(advantages, loss):
    inputs = tokens([0.0] * 3, advantages, mask=[1, 0, 1])
    assert token_mean(inputs, get_policy_loss("vanilla")(inputs, LossParams())).item() == loss


def test_rb9_a_mask_of_another_kind_is_refused():
    wrong = {"log_probs": torch.zeros(2), "old_log_probs": torch.zeros(2), "offsets": torch.tensor([0, 2])}
    with pytest.raises((ValueError, TypeError), match="mask"):  # TypeError: from the shape checks of the test run
        LossInputs(advantages=torch.ones(2), mask=torch.ones(2), **wrong)
    with pytest.raises((ValueError, TypeError), match="advantages"):
        LossInputs(advantages=torch.ones(3), mask=torch.ones(2).bool(), **wrong)


@pytest.mark.parametrize("name", known_policy_losses())
def test_rb11_on_policy_ratio_is_one(name):
    """Unchanged weights: the gradient is the plain policy gradient -A and no token counts as clipped."""
    inputs = tokens([0.0] * 4, [1.0, 1.0, 1.0, 1.0])
    outputs = get_policy_loss(name)(inputs, LossParams())
    outputs.per_token.sum().backward()
    torch.testing.assert_close(inputs.log_probs.grad, torch.full((4,), -1.0))
    assert all(values.sum() == 0.0 for values in outputs.metrics.values())


@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo", "sapo", "geo_mean"])
@pytest.mark.parametrize("gap", [130.0, -130.0])
def test_far_off_token_stays_finite(name, gap):
    for advantage in (1.0, -1.0):
        inputs = tokens([gap, 0.0], [advantage, advantage])
        outputs = get_policy_loss(name)(inputs, LossParams())
        outputs.per_token.sum().backward()
        assert torch.isfinite(outputs.per_token).all()
        assert torch.isfinite(inputs.log_probs.grad).all()


@pytest.mark.parametrize("name", known_policy_losses())
def test_nan_on_a_sampled_token_is_not_hidden(name):
    inputs = tokens([math.nan, 0.0], [1.0, 1.0])
    assert torch.isnan(token_mean(inputs, get_policy_loss(name)(inputs, LossParams())))
