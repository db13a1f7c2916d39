"""Importance weights, rejection masks and their metrics against golden values of a public implementation."""

import math

import pytest
import torch

from vrl.algorithms.padded import from_padded
from vrl.algorithms.rollout_correction import RolloutCorrectionParams, rollout_correction

SETTINGS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
)
# With fully masked rows the public implementation counts them in these too, and no other value is stored.
PEER_COUNTS_EMPTY_ROWS = ("rollout_is_seq_", "rollout_is_ratio_fraction_", "rollout_is_max", "rollout_is_min")


def corrected(data, case):
    batch = case["batch"]
    old, offsets = from_padded(data.tensor(f"{batch}.old_log_prob"))
    rollout = from_padded(data.tensor(f"{batch}.rollout_log_prob"))[0]
    mask = from_padded(data.tensor(f"{batch}.response_mask"))[0].bool()
    params = RolloutCorrectionParams(**{key: case[key] for key in SETTINGS})
    return rollout_correction(old, rollout, mask, offsets, params)


def expected_metrics(case):
    stored = case["metrics"]
    if case["flavor"] != "empty_rows":
        return stored
    by_row = ("rollout_rs_seq_masked_fraction",) if case["rollout_rs"] else ()
    skipped = PEER_COUNTS_EMPTY_ROWS if case["rollout_is"] == "sequence" else PEER_COUNTS_EMPTY_ROWS[:1]
    kept = {name: x for name, x in stored.items() if not name.startswith(skipped) and name not in by_row}
    return kept | case["formula_metrics"]


def mismatches(data, case):
    result = corrected(data, case)
    out = []
    if case["rollout_is"]:
        weights = data.tensor(f"{case['id']}.weights").reshape(-1)
        assert result.weights.dtype == torch.float32
        if not torch.allclose(result.weights, weights, **data.tolerance["weights"]):
            out.append(f"{case['id']} weights off by {(result.weights - weights).abs().max():.3g}")
    if case["rollout_rs"]:
        mask = data.tensor(f"{case['id']}.mask").reshape(-1).bool()
        if not torch.equal(result.mask, mask):
            out.append(f"{case['id']} mask differs at {(result.mask != mask).nonzero().flatten().tolist()}")
    tolerance = data.tolerance["metrics"]
    for name, value in expected_metrics(case).items():
        actual = result.metrics.get(name, math.nan)
        if not math.isclose(actual, value, rel_tol=tolerance["rtol"], abs_tol=tolerance["atol"]):
            out.append(f"{case['id']} {name} {actual}, not {value}")
    if case["flavor"] == "near" and result.metrics.keys() != case["metrics"].keys():
        out.append(f"{case['id']} metrics {result.metrics.keys() ^ case['metrics'].keys()}")
    return out


@pytest.mark.parametrize("flavor", ["near", "far", "multi_turn", "empty_rows", "overflow"])
def test_rollout_correction_equals_golden(golden, flavor):
    data = golden("rollout_correction")
    cases = [case for case in data.cases if case["flavor"] == flavor and "metrics" in case]
    assert len(cases) == (72 if flavor == "overflow" else 75)  # three more: weights all outside the band
    assert not [text for case in cases for text in mismatches(data, case)]


def test_settings_that_golden_refuses(golden):
    cases = [case for case in golden("rollout_correction").cases if "expected_error" in case]
    assert len(cases) == 10
    for case in cases:
        with pytest.raises(ValueError, match=r"rollout_correction\.rollout_"):
            RolloutCorrectionParams(**{key: case[key] for key in SETTINGS})


def test_weights_all_outside_the_band_are_zero(golden):
    data = golden("rollout_correction")
    cases = [case for case in data.cases if "ZeroDivisionError" in case.get("quirk", "")]
    assert len(cases) == 3
    for case in cases:
        result = corrected(data, case)
        assert result.weights.abs().sum() == 0.0
        assert result.metrics["rollout_is_eff_sample_size"] == 0.0
        assert result.metrics["rollout_is_oob_ratio"] == 1.0
