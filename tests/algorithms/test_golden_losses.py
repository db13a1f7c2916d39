"""Policy losses, value loss and KL against golden values and gradients of public implementations."""

import dataclasses
import math

import pytest
import torch

from vrl.algorithms.aggregation import Counts, aggregate, counts, token_sums
from vrl.algorithms.kl import AdaptiveKl, kl_estimate
from vrl.algorithms.losses.registry import LossInputs, LossParams, get_policy_loss
from vrl.algorithms.losses.value_loss import value_loss
from vrl.algorithms.padded import from_padded

CHOICE = "peer"  # gspo's log-ratio held under 10, k3 held within 10: both keep a far-off token finite
PARAM_KEYS = {
    "low": "clip_ratio_low",
    "high": "clip_ratio_high",
    "c": "clip_ratio_c",
    "tau_pos": "tau_pos",
    "tau_neg": "tau_neg",
    "lb": "clip_cov_lb",
    "ub": "clip_cov_ub",
    "ratio": "kl_cov_ratio",
    "coef": "ppo_kl_coef",
    "beta": "dro_beta",
}
LOSSES = {
    "vanilla": 432,
    "gspo": 216,
    "cispo": 192,
    "sapo": 48,
    "gpg": 96,
    "geo_mean": 42,
    "clip_cov": 76,
    "kl_cov": 76,
    "dppo_tv": 21,
    "dppo_kl": 21,
    "dro": 21,
}


def close(actual, stored, tolerance):
    return torch.allclose(actual.double(), torch.as_tensor(stored).double(), **tolerance)


def loss_inputs(data, case):
    arrays = {
        name: data.tensor(f"{case['batch']}.{name}")
        for name in ("log_prob", "old_log_prob", "advantages", "response_mask", "rollout_is_weights")
    }
    flat = {name: from_padded(x)[0] for name, x in arrays.items()}
    return LossInputs(
        log_probs=flat["log_prob"].requires_grad_(),
        old_log_probs=flat["old_log_prob"],
        advantages=flat["advantages"],
        mask=flat["response_mask"].bool(),
        offsets=from_padded(arrays["log_prob"])[1],
        rollout_is_weights=flat["rollout_is_weights"] if case["use_rollout_is_weights"] else None,
    )


def aggregated(per_token, inputs, case, mode):
    """The loss as the learner computes it; with `global` counts scaled by the data-parallel size, as FSDP needs."""
    everywhere = case.get("params", {}).get("global")
    local = counts(inputs.mask, inputs.offsets)
    total = Counts(everywhere["batch_num_tokens"], everywhere["global_batch_size"]) if everywhere else local
    width = case.get("params", {}).get("scale", int(inputs.offsets[1]))
    loss = aggregate(per_token, inputs.mask, inputs.offsets, mode, total, norm_length=float(width))
    return loss * (everywhere["dp_size"] if everywhere else 1)


def policy_loss_mismatch(data, case):
    inputs = loss_inputs(data, case)
    loss_fn = get_policy_loss(case["loss_mode"])
    given = {PARAM_KEYS[key]: value for key, value in case["params"].items() if key in PARAM_KEYS}
    params = LossParams(**given, clip_cov_ratio=1.0)  # clip_cov is stored where all tokens in the band are dropped
    mode = loss_fn.aggregation if case["loss_agg_mode"] == "n/a" else case["loss_agg_mode"]
    selected = loss_fn.select(inputs, params, torch.Generator())
    outputs = loss_fn(dataclasses.replace(inputs, selected=selected), params)
    loss = aggregated(outputs.per_token, inputs, case, mode)
    loss.backward()
    if not close(loss.detach(), data.expected_number(case, "loss", CHOICE), data.tolerance["loss"]):
        return f"{case['id']} loss {float(loss)}"
    grad = data.expected(case, "grad", CHOICE).reshape(-1)
    if not close(inputs.log_probs.grad, grad, data.tolerance["grad"]):
        return f"{case['id']} grad off by {(inputs.log_probs.grad - grad).abs().max():.3g}"
    if case["peer_quirk"]:
        return None  # metrics are the peer's
    tokens = max(int(inputs.mask.sum()), 1)
    for name, total in token_sums(outputs.metrics, inputs.mask).items():
        if not math.isclose(total / tokens, case["metrics"][name], rel_tol=1e-4, abs_tol=1e-5):
            return f"{case['id']} {name} {float(total / tokens)} instead of {case['metrics'][name]}"
    return None


@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss_equals_golden(golden, name):
    data = golden("policy_loss")
    cases = [case for case in data.cases if case["loss_mode"] == name]
    assert len(cases) == LOSSES[name]
    failures = [policy_loss_mismatch(data, case) for case in cases]
    assert not [text for text in failures if text]


def test_all_golden_policy_losses_are_built(golden):
    assert {case["loss_mode"] for case in golden("policy_loss").cases} == set(LOSSES)


def test_vanilla_reports_the_metrics_of_the_field(golden):
    data = golden("policy_loss")
    case = next(case for case in data.cases if case["loss_mode"] == "vanilla")
    metrics = get_policy_loss("vanilla")(loss_inputs(data, case), LossParams()).metrics
    assert set(metrics) == set(case["metrics"])


def value_loss_mismatch(data, case):
    names = ("vpreds", "values", "returns", "response_mask")
    arrays = {name: data.tensor(f"{case['batch']}.{name}") for name in names}
    flat = {name: from_padded(x)[0] for name, x in arrays.items()}
    offsets = from_padded(arrays["vpreds"])[1]
    mask = flat["response_mask"].bool()
    predicted = flat["vpreds"].requires_grad_()
    outputs = value_loss(predicted, flat["values"], flat["returns"], mask, case["cliprange_value"])
    total = counts(mask, offsets)
    loss = aggregate(outputs.per_token, mask, offsets, case["loss_agg_mode"], total, norm_length=float(offsets[1]))
    loss.backward()
    if not close(loss.detach(), case["loss"], data.tolerance["loss"]):
        return f"{case['id']} loss {float(loss)}"
    if not close(predicted.grad, data.tensor(f"{case['id']}.grad").reshape(-1), data.tolerance["grad"]):
        return f"{case['id']} grad"
    clipped = token_sums(outputs.metrics, mask)["vf_clipfrac"] / total.tokens
    return None if close(clipped, case["vf_clipfrac"], data.tolerance["loss"]) else f"{case['id']} vf_clipfrac"


def test_value_loss_equals_golden(golden):
    data = golden("value_loss")
    assert len(data.cases) == 144
    failures = [value_loss_mismatch(data, case) for case in data.cases]
    assert not [text for text in failures if text]


def kl_mismatch(data, case):
    log_probs = data.tensor(f"{case['batch']}.log_prob").reshape(-1).requires_grad_()
    ref = data.tensor(f"{case['batch']}.ref_log_prob").reshape(-1)
    weight = data.tensor(f"{case['batch']}.weight").reshape(-1)
    value = kl_estimate(log_probs, ref, torch.ones_like(ref, dtype=torch.bool), case["estimator"])
    (value * weight).sum().backward()
    if not close(value.detach(), data.expected(case, "value", CHOICE).reshape(-1), data.tolerance["value"]):
        return f"{case['id']} value"
    grad = data.expected(case, "grad", CHOICE).reshape(-1)
    return None if close(log_probs.grad, grad, data.tolerance["grad"]) else f"{case['id']} grad"


def test_kl_estimators_equal_golden(golden):
    data = golden("kl")
    cases = [case for case in data.cases if "estimator" in case and "expected_error" not in case]
    assert len(cases) == 90
    failures = [kl_mismatch(data, case) for case in cases]
    assert not [text for text in failures if text]


def test_unknown_kl_estimators_of_golden_are_refused(golden):
    cases = [case for case in golden("kl").cases if "expected_error" in case]
    assert {case["estimator"] for case in cases} == {"full", "k4"}
    token = torch.zeros(1)
    for case in cases:
        with pytest.raises(ValueError, match="known: kl, k1"):
            kl_estimate(token, token, token == 0, case["estimator"])


def test_adaptive_kl_equals_golden(golden):
    cases = [case for case in golden("kl").cases if case["flavor"] == "adaptive_controller"]
    assert len(cases) == 3
    for case in cases:
        controller = AdaptiveKl(beta=case["init_kl_coef"], target_kl=case["target_kl"], horizon=case["horizon"])
        for kl, n_steps, beta in zip(case["current_kl"], case["n_steps"], case["beta_after_each"], strict=True):
            controller = controller.updated(kl, n_steps)
            assert math.isclose(controller.beta, beta, rel_tol=1e-12)
