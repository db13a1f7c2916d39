"""Names that the settings share with the registries, and when old log-probs take a pass of their own."""

from typing import Any

import pytest

from vrl.algorithms.advantages.registry import get_advantage, known_advantages
from vrl.algorithms.losses.registry import get_policy_loss, known_policy_losses
from vrl.controller.run import needs_old_log_probs
from vrl.protocol.config.builder import build
from vrl.protocol.config.rules import GROUP_ESTIMATORS
from vrl.protocol.config.schema import GROUP_LOSSES, SUM_PI_SQUARED_ESTIMATORS, VALUE_ESTIMATORS

ONE_UPDATE = {"data": {"train_batch_size": 8}, "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8}}}


def test_the_settings_name_estimators_and_losses_as_the_registries_do():
    estimators = {name: get_advantage(name) for name in known_advantages()}
    assert {name for name, one in estimators.items() if one.needs_critic} == VALUE_ESTIMATORS
    assert {name for name, one in estimators.items() if one.needs_sum_pi_squared} == SUM_PI_SQUARED_ESTIMATORS
    assert set(GROUP_ESTIMATORS) <= estimators.keys()
    losses = [get_policy_loss(name) for name in known_policy_losses()]
    assert {loss.name for loss in losses if loss.needs_whole_groups} == GROUP_LOSSES
    assert {loss.name for loss in losses if loss.needs_ref_log_probs} == GROUP_LOSSES


@pytest.mark.parametrize("mode", [*sorted(GROUP_LOSSES), "vanilla"])
def test_losses_against_the_reference_bring_one(mode: str):
    config = build({"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": mode}}}})
    assert config.needs_reference == (mode in GROUP_LOSSES)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, False),
        ({"algorithm": {"mask_truncated_completions": True}}, False),
        ({"algorithm": {"use_kl_in_reward": True}}, True),
        ({"algorithm": {"adv_estimator": "optimal_token_baseline"}}, True),
        ({"algorithm": {"rollout_correction": {"rollout_is": "token"}}}, True),
        ({"algorithm": {"rollout_correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}}}, True),
        ({"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8, "policy_loss": {"loss_mode": "kl_cov"}}}}, True),
        ({"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 4}}}, True),
    ],
    ids=str,
)
def test_one_update_gives_its_own_old_log_probs_unless_the_driver_wants_them(changes: dict[str, Any], wanted: bool):
    assert needs_old_log_probs(build({**ONE_UPDATE, **changes})) is wanted
