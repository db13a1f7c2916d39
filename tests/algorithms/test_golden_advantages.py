"""Every advantage estimator against the golden advantages of public implementations."""

import pytest
import torch

from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageParams, get_advantage, known_advantages
from vrl.algorithms.padded import from_padded, to_padded

# gpg: the published alpha, which does not depend on where the scores' zero is. rloo: a group of one has baseline 0.
CHOICE = {"gpg": "formula", "rloo": "peer"}
ESTIMATORS = (
    "gae",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
)


def batch_inputs(data, case):
    arrays = {
        name: data.tensor(f"{case['batch']}.{name}") for name in ("response_mask", "token_level_rewards", "values")
    }
    flat = {name: from_padded(x)[0] for name, x in arrays.items()}
    uid = data.batches[case["batch"]]["uid"]
    return AdvantageInputs(
        token_level_rewards=flat["token_level_rewards"],
        mask=flat["response_mask"].bool(),
        group=torch.tensor([sorted(set(uid)).index(u) for u in uid]),
        offsets=from_padded(arrays["values"])[1],
        values=flat["values"],
        reward_baselines=data.tensor(f"{case['batch']}.reward_baselines"),
    )


def mismatch(data, case, inputs, outputs):
    choice = CHOICE.get(case["estimator"], "peer")
    advantages = data.expected(case, "advantages", choice)
    same_returns = case.get("returns") == "same as advantages"
    returns = advantages if same_returns else data.expected(case, "returns", choice)
    mask = to_padded(inputs.mask.float(), inputs.offsets).bool()
    for field, stored, actual in (
        ("advantages", advantages, outputs.advantages),
        ("returns", returns, outputs.returns),
    ):
        actual = to_padded(actual, inputs.offsets)
        if case["compare"] == "mask":
            actual, stored = actual[mask], stored[mask]
        if not torch.allclose(actual, stored, **data.tolerance):
            return f"{case['id']} {field}: off by {(actual - stored).abs().max():.3g}"
    return None


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimator_equals_golden(golden, estimator):
    data = golden("advantages")
    cases = [case for case in data.cases if case["estimator"] == estimator]
    assert len(cases) >= 27
    failures = []
    for case in cases:
        inputs = batch_inputs(data, case)
        params = AdvantageParams(**case["params"])
        if "expected_error" in case:
            with pytest.raises(ValueError, match="at least 2 rows a group"):
                get_advantage(estimator)(inputs, params)
            continue
        failures.append(mismatch(data, case, inputs, get_advantage(estimator)(inputs, params)))
    assert not [text for text in failures if text]


def test_every_golden_estimator_is_registered(golden):
    assert {case["estimator"] for case in golden("advantages").cases} == set(ESTIMATORS) <= set(known_advantages())
