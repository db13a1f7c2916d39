"""The classes themselves: their form, their number, their base file, and the sizes derived from them."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vrl.protocol.config.builder import build
from vrl.protocol.config.keys import is_open, key_types, leaf_keys
from vrl.protocol.config.reference import comments, keys_text, yaml_text
from vrl.protocol.config.schema import Config

FIELD_BUDGET = 300
OPEN = {
    "actor_rollout_ref.model.override_config",
    "critic.model.override_config",
    "actor_rollout_ref.rollout.engine_kwargs",
    "actor_rollout_ref.rollout.agent.environments",
    "reward_model.reward_kwargs",
    "custom_reward_function.reward_kwargs",
}
SECTIONS = {Config, *(kind for kind in key_types().values() if dataclasses.is_dataclass(kind))}
RENEW = "run python -m vrl.protocol.config.reference configs/ppo_trainer.yaml tests/protocol/config/keys.txt"
REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("section", sorted(SECTIONS, key=lambda section: section.__name__))
def test_every_class_is_a_frozen_value_whose_fields_say_what_they_are(section: Any):
    fields = dataclasses.fields(section)
    assert section.__dataclass_params__.frozen
    assert all(field.kw_only for field in fields)
    assert "__slots__" in vars(section)
    assert section.__doc__
    values = {field.name for field in fields if not dataclasses.is_dataclass(getattr(section(), field.name))}
    assert values == set(comments(section))


def test_the_list_of_keys_is_the_one_that_was_agreed():
    agreed = (Path(__file__).parent / "keys.txt").read_text(encoding="utf-8")
    assert keys_text() == agreed, f"a key came or went; if that is meant, {RENEW}"


def test_the_number_of_fields_stays_in_its_budget():
    assert sum(len(dataclasses.fields(section)) for section in SECTIONS) <= FIELD_BUDGET


def test_the_base_file_is_written_from_the_classes():
    assert (REPOSITORY / "configs/ppo_trainer.yaml").read_text(encoding="utf-8") == yaml_text(), RENEW


def test_only_these_dictionaries_are_open():
    assert {key for key in leaf_keys() if is_open(key)} == OPEN


def test_settings_import_without_torch_and_hydra():
    code = (
        "import sys; import vrl.protocol.config.rules, vrl.protocol.config.builder; "
        "sys.exit(bool({'torch', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


def test_sizes_follow_from_settings():
    config = build(
        {
            "data": {"train_batch_size": 20, "max_prompt_length": 100, "max_response_length": 28, "seed": 5},
            "actor_rollout_ref": {
                "model": {"path": "m"},
                "actor": {"ppo_mini_batch_size": 8, "ppo_epochs": 2, "ulysses_sequence_parallel_size": 2},
                "rollout": {"n": 4, "tensor_model_parallel_size": 4, "log_prob_max_token_len_per_gpu": 99},
            },
            "trainer": {"n_gpus_per_node": 8, "nnodes": 2, "seed": 7},
        }
    )
    assert config.world_size == 16
    assert config.data_parallel_size == 8
    assert [config.sequence_parallel_size(role) for role in ("actor", "reference", "critic", "rollout")] == [2, 2, 1, 1]
    assert config.num_replicas == 4
    assert config.rows_per_step == 80
    assert config.mini_batches_per_epoch == 3
    assert config.updates_per_step == 6
    assert config.max_model_len == 128
    assert (config.data_seed, config.rollout_seed) == (5, 7)
    assert (config.tokenizer_path, config.critic_model_path) == ("m", "m")
    assert (config.critic_mini_batch_size, config.critic_epochs, config.critic_token_budget) == (8, 2, 16384)
    assert (config.log_prob_token_budget, config.ref_token_budget) == (99, 16384)
    assert (config.log_prob_rows, config.ref_rows, config.critic_rows) == (None, None, None)


def test_rows_a_micro_batch_are_the_actors_where_a_role_has_none_of_its_own():
    actor = {"ppo_micro_batch_size_per_gpu": 4}
    config = build({"actor_rollout_ref": {"actor": actor}})
    assert (config.log_prob_rows, config.ref_rows, config.critic_rows) == (4, 4, 4)
    own = {
        "actor_rollout_ref": {
            "actor": actor,
            "rollout": {"log_prob_micro_batch_size_per_gpu": 8},
            "ref": {"log_prob_micro_batch_size_per_gpu": 16},
        },
        "critic": {"ppo_micro_batch_size_per_gpu": 2},
    }
    assert (build(own).log_prob_rows, build(own).ref_rows, build(own).critic_rows) == (8, 16, 2)


def test_roles_follow_from_settings():
    grpo = {"algorithm": {"adv_estimator": "grpo"}}
    assert build({}).needs_critic
    assert not build(grpo).needs_critic
    assert build(grpo | {"critic": {"enable": True}}).needs_critic
    assert not build({}).needs_reference
    assert build({"algorithm": {"use_kl_in_reward": True}}).needs_reference
    assert build({"actor_rollout_ref": {"actor": {"use_kl_loss": True}}}).needs_reference


def test_a_role_on_a_pool_of_its_own_has_ranks_of_its_own():
    pool = {"resource_pool": {"enable": True, "n_gpus_per_node": 3, "nnodes": 2}}
    values = {"trainer": {"n_gpus_per_node": 4}, "critic": pool, "reward_model": pool}
    config = build(values)
    assert list(config.own_pools) == ["critic"]  # there is no reward model
    assert [config.ranks(role) for role in ("actor", "reference", "critic", "reward_model", "rollout")] == [
        4,
        4,
        6,
        4,
        4,
    ]
    assert (config.world_size, config.total_ranks, config.ranks_per_node) == (4, 10, 7)
    both = build({**values, "reward_model": {**pool, "enable": True, "rule_weight": 0}})
    assert list(both.own_pools) == ["critic", "reward_model"]
    assert both.total_ranks == 16
    assert (config.scores_by_rule, both.scores_by_rule) == (True, False)


def test_clip_ratio_holds_for_both_sides_until_one_is_set():
    values = {"clip_ratio": 0.1, "clip_ratio_high": 0.28}
    actor = build({"actor_rollout_ref": {"actor": values}}).actor_rollout_ref.actor
    assert (actor.clip_low, actor.clip_high) == (0.1, 0.28)


def test_evaluation_is_greedy_unless_it_samples():
    def temperature(**values: Any) -> float:
        rollout = build({"actor_rollout_ref": {"rollout": {"val_kwargs": values}}}).actor_rollout_ref.rollout
        return rollout.val_kwargs.effective_temperature

    assert temperature(temperature=0.7) == 0.0
    assert temperature(temperature=0.7, do_sample=True) == 0.7


def test_every_episode_has_a_time_limit_and_a_plain_row_has_longer():
    for given, expected in ((None, (600.0, 7200.0)), (90.0, (90.0, 90.0))):
        agent = build(
            {"actor_rollout_ref": {"rollout": {"agent": {"episode_timeout": given}}}}
        ).actor_rollout_ref.rollout.agent
        assert (agent.max_seconds(acts=True), agent.max_seconds(acts=False)) == expected
