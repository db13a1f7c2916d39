"""Every registered policy loss and the value loss against slow float64 loops, values and gradients, on random rows."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vrl.algorithms.losses.registry import LossInputs, LossParams, get_policy_loss, known_policy_losses
from vrl.algorithms.losses.value_loss import value_loss

GARBAGE = (math.nan, math.inf, -math.inf, 1e30)
PARAMS = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.28,
    "clip_ratio_c": 2.5,
    "tau_pos": 1.5,
    "tau_neg": 2.0,
    "ppo_kl_coef": 0.3,
    "dro_beta": 0.7,
    "tba_beta": 0.5,
    "dpo_beta": 0.4,
}
DPO_FORMS = ({"dpo_label_smoothing": 0.1}, {"dpo_loss_type": "ipo"}, {})


@st.composite
def ragged_losses(draw):
    """Random rows in float64 with all that any loss reads, garbage wherever nothing was sampled."""
    masks = draw(st.lists(st.lists(st.booleans(), max_size=7), min_size=1, max_size=5))
    mask = torch.tensor([m for row in masks for m in row], dtype=torch.bool)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    garbage = draw(st.sampled_from(GARBAGE))

    def normal(scale):
        x = torch.randn(mask.shape, generator=generator, dtype=torch.float64) * scale
        return torch.where(mask, x, garbage)

    old = -normal(draw(st.sampled_from([1.0, 12.0]))).abs()
    new = -(old + normal(draw(st.sampled_from([0.1, 1.0, 12.0])))).abs()
    rows = len(masks)
    return LossInputs(
        log_probs=new.requires_grad_(),
        old_log_probs=old,
        advantages=normal(draw(st.sampled_from([0.0, 1.0]))),
        mask=mask,
        offsets=torch.tensor([0, *(len(row) for row in masks)]).cumsum(0),
        rollout_is_weights=normal(1.0).abs() + 0.1 if draw(st.booleans()) else None,
        ref_log_probs=normal(1.0),
        selected=torch.rand(mask.shape, generator=generator) < 0.4,
        group=(torch.arange(rows) // 2)[torch.randperm(rows, generator=generator)] * 7 - 3,
        scores=torch.randint(0, 3, (rows,), generator=generator).double(),
    )


def clip(x, low, high):
    """In torch scalars, with the gradient of the clamp."""
    return x.clamp(low, high)


def inside_trust_region(name, x, old, advantage, p):
    """DPPO's mask from plain numbers."""
    new, before = math.exp(x), math.exp(old)
    if name == "dppo_tv":
        return new - before <= p.clip_ratio_high if advantage > 0 else new - before >= -p.clip_ratio_low
    kl = before * math.log(before / new) + (1 - before) * math.log((1 - before) / (1 - new))
    if advantage > 0:
        return kl <= p.clip_ratio_high or new <= before
    return kl <= p.clip_ratio_low or new >= before


def slow_token(name, x, old, advantage, chosen, p):
    """Loss of one token from 0-dim tensors."""
    ratio = clip(x - old, -20.0, 20.0).exp()
    clipped = -advantage * clip(ratio, 1 - p.clip_ratio_low, 1 + p.clip_ratio_high)
    if name == "vanilla":
        loss = torch.maximum(-advantage * ratio, clipped)
        return torch.minimum(loss, -advantage * p.clip_ratio_c) if advantage < 0 else loss
    if name == "cispo":
        return clipped.detach() * x
    if name == "sapo":
        tau = p.tau_pos if advantage > 0 else p.tau_neg
        return -advantage * 4.0 / tau / (1.0 + (-tau * (ratio - 1.0)).exp())
    if name == "clip_cov":
        return 0.0 * x if chosen else torch.maximum(-advantage * ratio, clipped)
    if name == "kl_cov":
        return -advantage * ratio + (p.ppo_kl_coef * (x - old).abs() if chosen else 0.0)
    if name in ("dppo_tv", "dppo_kl"):
        inside = inside_trust_region(name, x.item(), old.item(), advantage.item(), p)
        return -advantage * min(ratio.item(), p.clip_ratio_c) * x * inside
    if name == "dro":
        return -(x * advantage - p.dro_beta / 2 * (x - old) ** 2)
    assert name in ("reinforce", "gpg")
    return -advantage * x


def slow_row(name, x, old, advantages, chosen, p):
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
        return [-advantages.mean() * clip(torch.stack(bounded).mean(), -math.inf, 20.0).exp()] * len(x)
    return [slow_token(name, *token, p) for token in zip(x, old, advantages, chosen, strict=True)]


def slow_balance(pi, ref, members, scores, p):
    """Trajectory balance of one group: loss of each member."""
    terms = [(ref[i] - pi[i].detach() + scores[i] / p.tba_beta) for i in members]
    log_z = sum(terms) / len(terms)
    return {i: (log_z + pi[i] - ref[i] - scores[i] / p.tba_beta) ** 2 for i in members}


def slow_preference(pi, ref, members, scores, p):
    """Preference loss of one group of at most two."""
    if len(members) == 1:
        return {members[0]: 0.0 * pi[members[0]]}
    first, second = members
    chosen, rejected = (first, second) if scores[first] >= scores[second] else (second, first)
    z = pi[chosen] - ref[chosen] - pi[rejected] + ref[rejected]
    if p.dpo_loss_type == "ipo":
        loss = (z - 1 / (2 * p.dpo_beta)) ** 2
    else:
        right, wrong = (torch.log1p((-s * p.dpo_beta * z).exp()) for s in (1, -1))
        loss = (1 - p.dpo_label_smoothing) * right + p.dpo_label_smoothing * wrong
    return {first: loss, second: loss}


def sampled_by_row(inputs):
    borders = inputs.offsets.tolist()
    return [[t for t in range(a, b) if inputs.mask[t]] for a, b in itertools.pairwise(borders)]


def slow_rows(name, inputs, log_probs, p):
    """Loss of each row, group by group."""
    zero = torch.zeros((), dtype=torch.float64)
    rows = sampled_by_row(inputs)
    pi = [sum((log_probs[t] for t in at), zero) for at in rows]
    ref = [sum(inputs.ref_log_probs[t].item() for t in at) for at in rows]
    scores, groups, losses = inputs.scores.tolist(), inputs.group.tolist(), {}
    for group in set(groups):
        members = [row for row in range(len(rows)) if groups[row] == group]
        slow = slow_balance if name == "tba" else slow_preference
        losses |= slow(pi, ref, members, scores, p)
    return [losses[row] for row in range(len(rows))]


def slow_loss(name, inputs, log_probs, params):
    """Per-token loss by rows and tokens; 0 where nothing was sampled."""
    out = [torch.zeros((), dtype=torch.float64)] * inputs.mask.numel()
    over_rows = slow_rows(name, inputs, log_probs, params) if name in ("tba", "dpo") else None
    for row, at in enumerate(sampled_by_row(inputs)):
        if not at:
            continue
        of_tokens = (log_probs[at], inputs.old_log_probs[at], inputs.advantages[at], inputs.selected[at])
        losses = [over_rows[row]] * len(at) if over_rows else slow_row(name, *of_tokens, params)
        weights = torch.ones(len(at)) if inputs.rollout_is_weights is None else inputs.rollout_is_weights[at]
        if name == "geo_mean":
            weights = torch.full((len(at),), float(weights.log().mean().exp()), dtype=torch.float64)
        for t, loss, weight in zip(at, losses, weights, strict=True):
            out[t] = loss * weight
    return torch.stack(out) if out else torch.zeros(0, dtype=torch.float64)


def assert_same(actual, log_probs, expected, slow_log_probs):
    """Values, and gradients of their sum."""
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=1e-9, atol=1e-9)
    log_probs.grad = slow_log_probs.grad = None
    actual.sum().backward(retain_graph=True)
    if expected.requires_grad:
        expected.sum().backward(retain_graph=True)
        torch.testing.assert_close(log_probs.grad, slow_log_probs.grad, rtol=1e-8, atol=1e-8)
    else:
        assert log_probs.grad.abs().sum() == 0.0


@pytest.mark.parametrize("name", known_policy_losses())
@settings(max_examples=30, deadline=None, derandomize=True)
@given(inputs=ragged_losses(), form=st.sampled_from(DPO_FORMS))
def test_policy_loss_equals_slow_loops(name, inputs, form):
    params = LossParams(**PARAMS, **form)
    loss = get_policy_loss(name)
    if loss.needs_whole_groups:
        inputs = dataclasses.replace(inputs, rollout_is_weights=None)
    outputs = loss(inputs, params)
    log_probs = inputs.log_probs.detach().clone().requires_grad_()
    assert_same(outputs.per_token, inputs.log_probs, slow_loss(name, inputs, log_probs, params), log_probs)
    for values in outputs.metrics.values():
        assert values[~inputs.mask].tolist() == [0.0] * int((~inputs.mask).sum())
        assert not values.requires_grad
    if loss.needs_whole_groups:
        by_row = torch.stack([x.reshape(()) for x in slow_rows(name, inputs, log_probs, params)])
        assert_same(outputs.per_row, inputs.log_probs, by_row, log_probs)
        assert not any(values.requires_grad for values in outputs.row_metrics.values())


def slow_covariances(inputs):
    """Token to covariance, from plain numbers."""
    at = [t for t in range(inputs.mask.numel()) if inputs.mask[t]]
    log_probs, advantages = inputs.log_probs.tolist(), inputs.advantages.tolist()
    means = [sum(x[t] for t in at) / max(len(at), 1) for x in (log_probs, advantages)]
    return {t: (log_probs[t] - means[0]) * (advantages[t] - means[1]) for t in at}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(inputs=ragged_losses(), ratio=st.sampled_from([0.0, 0.01, 0.3, 0.5, 1.0]))
def test_kl_cov_chooses_the_largest_covariances_of_the_mini_batch(inputs, ratio):
    chosen = get_policy_loss("kl_cov").select(inputs, LossParams(kl_cov_ratio=ratio), torch.Generator())
    covariances = slow_covariances(inputs)
    assert not (chosen & ~inputs.mask).any()
    tokens = len(covariances)
    assert int(chosen.sum()) == (min(max(1, int(ratio * tokens)), tokens) if ratio else 0)
    taken = [covariance for t, covariance in covariances.items() if chosen[t]]
    left = [covariance for t, covariance in covariances.items() if not chosen[t]]
    if taken and left:
        assert min(taken) >= max(left) - 1e-9


@settings(max_examples=40, deadline=None, derandomize=True)
@given(inputs=ragged_losses(), ratio=st.sampled_from([0.0, 0.01, 0.3, 1.0]), seed=st.integers(0, 9))
def test_clip_cov_chooses_at_random_inside_the_band(inputs, ratio, seed):
    params = LossParams(clip_cov_ratio=ratio, clip_cov_lb=0.05, clip_cov_ub=2.0)
    chosen, again = (
        get_policy_loss("clip_cov").select(inputs, params, torch.Generator().manual_seed(seed)) for _ in range(2)
    )
    assert torch.equal(chosen, again)
    candidates = []
    for t, covariance in slow_covariances(inputs).items():
        advantage, gap = inputs.advantages[t].item(), inputs.log_probs[t].item() - inputs.old_log_probs[t].item()
        ratio_above, ratio_below = math.exp(min(gap, 20)) > 1.2, math.exp(max(gap, -20)) < 0.8
        clipped = (advantage > 0 and ratio_above) or (advantage < 0 and ratio_below)
        if 0.05 < covariance < 2.0 and not clipped:
            candidates.append(t)
    tokens = int(inputs.mask.sum())
    assert set(chosen.nonzero().flatten().tolist()) <= set(candidates)
    assert int(chosen.sum()) == (min(max(1, int(ratio * tokens)), len(candidates)) if ratio else 0)


def test_clip_cov_draws_anew_with_another_seed():
    log_probs = torch.tensor([-3.0, -1.0]).repeat(100)
    inputs = LossInputs(
        log_probs=log_probs,
        old_log_probs=log_probs,
        advantages=torch.tensor([-2.0, 2.0]).repeat(100),
        mask=torch.ones(200, dtype=torch.bool),
        offsets=torch.tensor([0, 200]),
    )
    params = LossParams(clip_cov_ratio=0.1)
    draws = [get_policy_loss("clip_cov").select(inputs, params, torch.Generator().manual_seed(s)) for s in (0, 1)]
    assert [int(chosen.sum()) for chosen in draws] == [20, 20]
    assert not torch.equal(*draws)


def test_equal_advantages_leave_the_choice_to_the_order():
    inputs = LossInputs(
        log_probs=torch.tensor([-0.1, -0.7, -0.3]),
        old_log_probs=torch.zeros(3),
        advantages=torch.full((3,), 0.7),
        mask=torch.ones(3, dtype=torch.bool),
        offsets=torch.tensor([0, 3]),
    )
    chosen = get_policy_loss("kl_cov").select(inputs, LossParams(), torch.Generator())
    assert chosen.tolist() == [True, False, False]


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
