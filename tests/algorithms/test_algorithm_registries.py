"""Both registries: everything is there after importing the package, unknown and double names are refused."""

import dataclasses
import pkgutil

import pytest
import torch

from vrl.algorithms import advantages, losses
from vrl.algorithms.advantages.registry import (
    AdvantageInputs,
    AdvantageParams,
    get_advantage,
    known_advantages,
    register_advantage,
)
from vrl.algorithms.losses.registry import get_policy_loss, known_policy_losses, register_policy_loss


def modules_of(package):
    return {module.name for module in pkgutil.iter_modules(package.__path__)} - {
        "registry",
        "sampled",
        "turns",
        "ratio",
        "covariance",
        "whole_rows",
        "value_loss",
    }


def test_importing_the_package_registers_everything():
    assert modules_of(advantages) == set(known_advantages())
    assert modules_of(losses) | {"gpg"} == set(known_policy_losses())


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="unknown adv_estimator 'ppo'; known: bi_level_gae, gae, gdpo, "):
        get_advantage("ppo")
    with pytest.raises(ValueError, match="unknown policy loss 'ppo'; known: cispo, "):
        get_policy_loss("ppo")


def test_second_registration_is_refused():
    with pytest.raises(ValueError, match="'grpo' is already registered"):
        register_advantage("grpo")(get_advantage("grpo").compute)
    with pytest.raises(ValueError, match="'vanilla' is already registered"):
        register_policy_loss("vanilla")(get_policy_loss("vanilla").compute)


def test_estimators_say_what_they_need():
    estimators = [get_advantage(name) for name in known_advantages()]
    assert {e.name for e in estimators if e.needs_critic} == {"gae", "bi_level_gae"}
    assert {e.name for e in estimators if e.needs_reward_baselines} == {"remax"}
    assert {e.name for e in estimators if e.needs_turn_ids} == {"bi_level_gae", "gigpo", "grpo_turn"}
    assert {e.name for e in estimators if e.needs_state_ids} == {"gigpo"}
    assert {e.name for e in estimators if e.needs_reward_components} == {"gdpo"}
    assert {e.name for e in estimators if e.needs_sum_pi_squared} == {"optimal_token_baseline"}


def test_losses_whose_paper_fixes_the_aggregation_say_so():
    fixed = {name for name in known_policy_losses() if get_policy_loss(name).aggregation == "seq-mean-token-mean"}
    assert fixed == {"gspo", "sapo", "geo_mean", "tba", "dpo"}


def test_losses_say_what_they_need():
    known = [get_policy_loss(name) for name in known_policy_losses()]
    assert {loss.name for loss in known if loss.needs_selection} == {"clip_cov", "kl_cov"}
    assert {loss.name for loss in known if loss.needs_whole_groups} == {"tba", "dpo"}
    assert {loss.name for loss in known if loss.needs_ref_log_probs} == {"tba", "dpo"}


def inputs_of_one_token():
    return AdvantageInputs(
        token_level_rewards=torch.ones(1),
        mask=torch.tensor([True]),
        group=torch.tensor([0]),
        offsets=torch.tensor([0, 1]),
    )


@pytest.mark.parametrize(
    ("name", "given", "missing"),
    [
        ("gae", {}, "values: give the run a critic"),
        ("remax", {}, "reward_baselines"),
        ("bi_level_gae", {"turn_ids": torch.tensor([0])}, "values"),
        ("bi_level_gae", {"values": torch.zeros(1)}, "turn_ids"),
        ("grpo_turn", {}, "turn_ids"),
        ("gigpo", {"state_ids": torch.tensor([0])}, "turn_ids"),
        ("gigpo", {"turn_ids": torch.tensor([0])}, "state_ids"),
        ("gdpo", {}, "reward_components.*algorithm.gdpo_reward_keys"),
        ("optimal_token_baseline", {"old_log_probs": torch.zeros(1)}, "old_log_probs and sum_pi_squared"),
        ("optimal_token_baseline", {"sum_pi_squared": torch.ones(1)}, "let the actor return them"),
    ],
)
def test_missing_inputs_are_refused(name, given, missing):
    inputs = dataclasses.replace(inputs_of_one_token(), **given)
    with pytest.raises(ValueError, match=f"^adv_estimator={name} needs .*{missing}"):
        get_advantage(name)(inputs, AdvantageParams())


def test_inputs_that_do_not_fit_together_are_refused():
    good = inputs_of_one_token()
    with pytest.raises(ValueError, match="run from 0 to the 1 tokens"):
        dataclasses.replace(good, offsets=torch.tensor([0, 2]))
    with pytest.raises((ValueError, TypeError), match="mask"):  # TypeError: from the shape checks of the test run
        dataclasses.replace(good, mask=torch.tensor([1]))
    with pytest.raises((ValueError, TypeError), match="group"):
        dataclasses.replace(good, group=torch.tensor([0, 0]))
    with pytest.raises((ValueError, TypeError), match="turn_ids"):
        dataclasses.replace(good, turn_ids=torch.tensor([0, 0]))
    with pytest.raises((ValueError, TypeError), match="reward_components"):
        dataclasses.replace(good, reward_components=torch.zeros(2, 3))


def test_turn_ids_that_go_down_are_refused():
    inputs = AdvantageInputs(
        token_level_rewards=torch.zeros(5),
        mask=torch.tensor([True, True, True, False, True]),
        group=torch.tensor([0, 0]),
        offsets=torch.tensor([0, 2, 5]),
        turn_ids=torch.tensor([1, 1, 1, -1, 0]),
    )
    with pytest.raises(ValueError, match=r"never go down, but row 1 has \[1, 0\]"):
        get_advantage("grpo_turn")(inputs, AdvantageParams())
    with pytest.raises(ValueError, match=r"row 0 has \[-1\]"):
        get_advantage("grpo_turn")(dataclasses.replace(inputs, turn_ids=torch.full((5,), -1)), AdvantageParams())


def test_gdpo_wants_one_weight_a_component():
    inputs = dataclasses.replace(inputs_of_one_token(), reward_components=torch.ones(1, 3))
    with pytest.raises(ValueError, match="2 weights for 3 reward components"):
        get_advantage("gdpo")(inputs, AdvantageParams(component_weights=(1.0, 1.0)))
