"""Which names a run can feed, and when old log-probs take a pass of their own."""

from typing import Any

import pytest

from vrl.algorithms.advantages.registry import get_advantage, known_advantages
from vrl.controller.launch import known_names
from vrl.controller.run import needs_old_log_probs
from vrl.protocol.config.builder import build
from vrl.protocol.config.rules import GROUP_ESTIMATORS
from vrl.protocol.config.schema import VALUE_ESTIMATORS

ONE_UPDATE = {"data": {"train_batch_size": 8}, "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8}}}


def test_the_settings_name_estimators_as_the_registry_does():
    estimators = {name: get_advantage(name) for name in known_advantages()}
    assert {name for name, one in estimators.items() if one.needs_critic} == VALUE_ESTIMATORS
    assert set(GROUP_ESTIMATORS) <= estimators.keys()


def test_losses_that_choose_tokens_can_be_run_and_those_over_groups_cannot():
    names = known_names().policy_losses
    assert {"vanilla", "clip_cov", "kl_cov"} <= set(names)
    assert not {"tba", "dpo"} & set(names)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, False),
        ({"algorithm": {"mask_truncated_completions": True}}, False),
        ({"algorithm": {"use_kl_in_reward": True}}, True),
        ({"algorithm": {"rollout_correction": {"rollout_is": "token"}}}, True),
        ({"algorithm": {"rollout_correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}}}, True),
        ({"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8, "policy_loss": {"loss_mode": "kl_cov"}}}}, True),
        ({"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 4}}}, True),
    ],
    ids=str,
)
def test_one_update_gives_its_own_old_log_probs_unless_the_driver_wants_them(changes: dict[str, Any], wanted: bool):
    assert needs_old_log_probs(build({**ONE_UPDATE, **changes})) is wanted
