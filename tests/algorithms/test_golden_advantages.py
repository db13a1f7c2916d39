"""Advantage estimators against the golden advantages of public implementations."""

from collections import defaultdict

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


def episodes(data, case):
    """Golden rows are steps of episodes: joins the steps of an episode, in order, into one row of several turns.

    Also gives the golden row of every token.
    """
    batch = data.batches[case["batch"]]
    mask, step_rewards = (data.tensor(f"{batch['id']}.{name}") for name in ("response_mask", "step_raw_rewards"))
    rewards = torch.zeros(mask.shape)
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    rewards[torch.arange(len(rewards)), last] = step_rewards
    steps_of = defaultdict(list)
    for step, episode in enumerate(batch["traj_uid"]):
        steps_of[episode].append(step)
    order = torch.tensor([step for steps in steps_of.values() for step in steps])
    turns = torch.tensor([k for steps in steps_of.values() for k in range(len(steps))])
    uid = [batch["uid"][steps[0]] for steps in steps_of.values()]
    width = mask.shape[1]
    inputs = AdvantageInputs(
        token_level_rewards=from_padded(rewards[order])[0],
        mask=from_padded(mask[order])[0].bool(),
        group=torch.tensor([sorted(set(uid)).index(u) for u in uid]),
        offsets=torch.tensor([0, *(len(steps) * width for steps in steps_of.values())]).cumsum(0),
        turn_ids=turns.repeat_interleave(width),
        state_ids=torch.tensor(case["step_group"])[order].repeat_interleave(width),
    )
    return inputs, order


def test_gigpo_equals_golden(golden):
    """The formula's values: episode statistics over episodes, as in the paper, and not over steps."""
    data = golden("gigpo")
    failures = []
    for case in data.cases:
        inputs, order = episodes(data, case)
        params = AdvantageParams(
            gamma=case["gamma"],
            norm_adv_by_std=case["mode"] == "mean_std_norm",
            step_advantage_w=case["step_advantage_w"],
        )
        outputs = get_advantage("gigpo")(inputs, params)
        stored = data.expected(case, "advantages", "formula")[order]
        if not torch.allclose(outputs.advantages.view(stored.shape), stored, **data.tolerance):
            failures.append(f"{case['id']}: off by {(outputs.advantages.view(stored.shape) - stored).abs().max():.3g}")
        step_returns = torch.tensor(case["step_returns"])[order].repeat_interleave(stored.shape[1])
        if not torch.allclose(outputs.returns, step_returns * inputs.mask, **data.tolerance):
            failures.append(f"{case['id']}: returns")
    assert len(data.cases) == 78
    assert not failures
