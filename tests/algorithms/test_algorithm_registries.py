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
        "ratio",
        "value_loss",
    }


def test_importing_the_package_registers_everything():
    assert modules_of(advantages) == set(known_advantages())
    assert modules_of(losses) | {"gpg"} == set(known_policy_losses())


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="unknown adv_estimator 'ppo'; known: gae, gpg, grpo, "):
        get_advantage("ppo")
    with pytest.raises(ValueError, match="unknown policy loss 'ppo'; known: cispo, "):
        get_policy_loss("ppo")


def test_second_registration_is_refused():
    with pytest.raises(ValueError, match="'grpo' is already registered"):
        register_advantage("grpo")(get_advantage("grpo").compute)
    with pytest.raises(ValueError, match="'vanilla' is already registered"):
        register_policy_loss("vanilla")(get_policy_loss("vanilla").compute)


def test_estimators_say_what_they_need():
    needs_critic = {name for name in known_advantages() if get_advantage(name).needs_critic}
    needs_baselines = {name for name in known_advantages() if get_advantage(name).needs_reward_baselines}
    assert (needs_critic, needs_baselines) == ({"gae"}, {"remax"})


def test_losses_whose_paper_fixes_the_aggregation_say_so():
    fixed = {name for name in known_policy_losses() if get_policy_loss(name).aggregation == "seq-mean-token-mean"}
    assert fixed == {"gspo", "sapo", "geo_mean"}


def inputs_of_one_token():
    return AdvantageInputs(
        token_level_rewards=torch.ones(1),
        mask=torch.tensor([True]),
        group=torch.tensor([0]),
        offsets=torch.tensor([0, 1]),
    )


def test_missing_inputs_are_refused():
    with pytest.raises(ValueError, match="adv_estimator=gae needs values"):
        get_advantage("gae")(inputs_of_one_token(), AdvantageParams())
    with pytest.raises(ValueError, match="adv_estimator=remax needs reward_baselines"):
        get_advantage("remax")(inputs_of_one_token(), AdvantageParams())


def test_inputs_that_do_not_fit_together_are_refused():
    good = inputs_of_one_token()
    with pytest.raises(ValueError, match="run from 0 to the 1 tokens"):
        dataclasses.replace(good, offsets=torch.tensor([0, 2]))
    with pytest.raises((ValueError, TypeError), match="mask"):  # TypeError: from the shape checks of the test run
        dataclasses.replace(good, mask=torch.tensor([1]))
    with pytest.raises((ValueError, TypeError), match="group"):
        dataclasses.replace(good, group=torch.tensor([0, 0]))
