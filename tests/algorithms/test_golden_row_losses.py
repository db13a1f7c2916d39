"""The losses over whole rows (trajectory balance, online preferences) against golden values and gradients."""

import math

import pytest
import torch

from vrl.algorithms.aggregation import aggregate, counts
from vrl.algorithms.losses.registry import LossInputs, LossParams, get_policy_loss
from vrl.algorithms.padded import from_padded
from vrl.algorithms.segments import row_sum

PAIR_METRICS = ("rewards_chosen", "rewards_rejected", "rewards_margins", "rewards_accuracies")


def close(actual, stored, tolerance):
    return torch.allclose(actual.double(), torch.as_tensor(stored).double(), **tolerance)


def row_inputs(data, batch, scores, group, reference_free=False):
    """Rows of a padded golden batch; old log-probs and advantages hold what must not be read."""
    log_probs, offsets = from_padded(data.tensor(f"{batch}.log_prob"))
    ref = from_padded(data.tensor(f"{batch}.ref_log_prob"))[0]
    unread = torch.full_like(log_probs, math.nan)
    return LossInputs(
        log_probs=log_probs.requires_grad_(),
        old_log_probs=unread,
        advantages=unread,
        mask=from_padded(data.tensor(f"{batch}.response_mask"))[0].bool(),
        offsets=offsets,
        ref_log_probs=torch.zeros_like(ref) if reference_free else ref,
        group=torch.tensor(group),
        scores=scores,
    )


def mismatch(data, case, inputs, outputs):
    """Over all rows as golden has it; and as the loss is aggregated, where every row has a sampled token."""
    ways = {"mean over rows": outputs.per_row.mean()}
    if not (inputs.offsets.diff() == 0).any() and counts(inputs.mask, inputs.offsets).sequences == len(inputs.scores):
        total = counts(inputs.mask, inputs.offsets)
        mode = get_policy_loss("tba").aggregation
        ways["aggregated"] = aggregate(outputs.per_token, inputs.mask, inputs.offsets, mode, total)
    for way, loss in ways.items():
        inputs.log_probs.grad = None
        loss.backward(retain_graph=True)
        if not close(loss.detach(), case["loss"], data.tolerance["loss"]):
            return f"{case['id']} loss {float(loss)}, {way}"
        grad = data.tensor(f"{case['id']}.grad").reshape(-1)
        if not close(inputs.log_probs.grad, grad, data.tolerance["grad"]):
            return f"{case['id']} grad off by {(inputs.log_probs.grad - grad).abs().max():.3g}, {way}"
    return None


def test_trajectory_balance_equals_golden(golden):
    data = golden("tba")
    data.tolerance.pop("note", None)
    assert len(data.cases) == 18
    failures = []
    for case in data.cases:
        names = sorted(set(case["uid"]))
        group = [names.index(uid) for uid in case["uid"]]
        inputs = row_inputs(data, case["id"], data.tensor(f"{case['id']}.rewards"), group)
        outputs = get_policy_loss("tba")(inputs, LossParams(tba_beta=case["beta"]))
        failures.append(mismatch(data, case, inputs, outputs))
        log_z = torch.tensor([case["log_z"][uid] for uid in case["uid"]], dtype=torch.float64)
        if not close(outputs.row_metrics["tba_log_z"], log_z, data.tolerance["loss"]):
            failures.append(f"{case['id']} log_z")
    assert not [text for text in failures if text]


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_online_preference_loss_equals_golden(golden, loss_type):
    data = golden("online_dpo")
    cases = [case for case in data.cases if case["loss_type"] == loss_type]
    assert len(cases) == {"sigmoid": 36, "ipo": 24}[loss_type]
    failures = []
    for case in cases:
        rewards, offsets = from_padded(data.tensor(f"{case['batch']}.token_level_rewards"))
        mask = from_padded(data.tensor(f"{case['batch']}.response_mask"))[0].bool()
        scores = row_sum(rewards * mask, offsets)
        group = [row // 2 for row in range(len(scores))]
        inputs = row_inputs(data, case["batch"], scores, group, case["reference_free"])
        params = LossParams(dpo_loss_type=loss_type, dpo_beta=case["beta"], dpo_label_smoothing=case["label_smoothing"])
        outputs = get_policy_loss("dpo")(inputs, params)
        failures.append(mismatch(data, case, inputs, outputs))
        for name in () if case["reference_free"] else PAIR_METRICS:  # stored against the reference all the same
            if not math.isclose(outputs.row_metrics[name].mean(), case[name], rel_tol=1e-4, abs_tol=1e-5):
                failures.append(f"{case['id']} {name} {float(outputs.row_metrics[name].mean())}, not {case[name]}")
    assert not [text for text in failures if text]
