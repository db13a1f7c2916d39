"""Which names a run can feed, which roles it has, and when old log-probs take a pass of their own."""

from pathlib import Path
from typing import Any

import pytest

from vrl.algorithms.advantages.registry import get_advantage, known_advantages
from vrl.controller.launch import check_model, known_names
from vrl.controller.run import needs_old_log_probs, role_names
from vrl.models.tiny import build_tiny_model
from vrl.protocol.config.builder import build
from vrl.protocol.config.rules import GROUP_ESTIMATORS
from vrl.protocol.config.schema import VALUE_ESTIMATORS
from vrl.protocol.errors import ConfigError

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


def test_a_reference_takes_no_role_of_its_own_where_the_actor_has_an_adapter():
    policy: dict[str, Any] = {"actor": {"use_kl_loss": True}}
    assert role_names(build({"actor_rollout_ref": policy, "algorithm": {"adv_estimator": "grpo"}})) == [
        "actor", "reference", "rollout"
    ]  # fmt: skip
    for lora in ({"lora_rank": 8}, {"lora_adapter_path": "adapter"}):
        adapted = build({"actor_rollout_ref": policy | {"model": lora}, "algorithm": {"adv_estimator": "grpo"}})
        assert role_names(adapted) == ["actor", "rollout"]


@pytest.mark.parametrize("section", ["actor_rollout_ref", "critic"])
def test_layers_that_the_model_lacks_are_refused_before_anything_starts(tmp_path: Path, section: str):
    folder = build_tiny_model("qwen2", tmp_path / "model", ["a"], seed=0)
    lora = {"lora_rank": 8, "target_modules": ["query"]}
    values: dict[str, Any] = {"actor_rollout_ref": {"model": {"path": str(folder)}}, "critic": {"model": {}}}
    check_model(build(values))
    values[section]["model"] |= lora
    with pytest.raises(ConfigError, match=f"{section}.model.target_modules=.*'query' matches no linear layer"):
        check_model(build(values))
