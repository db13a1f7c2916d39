"""Rules across keys: each fault is named with its numbers and a value that would do."""

import copy
from typing import Any

import pytest

from vrl.protocol.config.builder import build
from vrl.protocol.config.keys import key_types
from vrl.protocol.config.ranges import LIMITS
from vrl.protocol.config.rules import (
    WITHOUT_EFFECT,
    Machine,
    check,
    check_heads,
    heads_fit,
    largest_divisor,
)
from vrl.protocol.config.schema import Config
from vrl.protocol.errors import ConfigError

GOOD = {
    "data.train_files": ["a.parquet"],
    "data.val_files": ["b.parquet"],
    "data.train_batch_size": 16,
    "actor_rollout_ref.model.path": "models/m",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
    "actor_rollout_ref.rollout.n": 8,
    "algorithm.adv_estimator": "grpo",
    "trainer.n_gpus_per_node": 8,
}


def config_with(changes: dict[str, Any]) -> Config:
    values: dict[str, Any] = {}
    for key, value in (copy.deepcopy(GOOD) | changes).items():
        *sections, name = key.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return build(values)


def faults(changes: dict[str, Any], machine: Machine | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        check(config_with(changes), machine)
    return str(error.value)


def test_a_good_config_passes_without_a_word():
    assert check(config_with({}), Machine(gpus=8, cores=64)) == ()


def pool(section: str, ranks: int) -> dict[str, Any]:
    return {f"{section}.resource_pool.enable": True, f"{section}.resource_pool.n_gpus_per_node": ranks}


R, A, M = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model"
REWARD_MODEL = {"reward_model.enable": True, "reward_model.model.path": "models/rm"}
ZERO_VARIANCE = {"algorithm.zero_variance_filter": True}
FAULTS = [
    ({"data.train_batch_size": 20}, ["train_batch_size=20", "ppo_mini_batch_size=8", "set", "ppo_mini_batch_size=5"]),
    ({f"{A}.ppo_mini_batch_size": 256}, ["train_batch_size=16", "ppo_mini_batch_size=256", "ppo_mini_batch_size=16"]),
    (
        {"algorithm.adv_estimator": "gae", "critic.ppo_mini_batch_size": 6},
        ["critic.ppo_mini_batch_size=6", "train_batch_size=16", "critic.ppo_mini_batch_size=4"],
    ),
    (
        {f"{R}.tensor_model_parallel_size": 3},
        ["parallel_size=3", "8 ranks", "parallel_size=2"],
    ),
    ({f"{A}.ulysses_sequence_parallel_size": 16}, ["=16", "8 ranks", "ulysses_sequence_parallel_size=8"]),
    ({f"{A}.fsdp_config.fsdp_size": 5}, ["fsdp_size=5", "8 ranks", "fsdp_size=4"]),
    ({f"{R}.name": "hf", f"{R}.tensor_model_parallel_size": 2}, ["name=hf", "tensor_model_parallel_size=1"]),
    ({f"{R}.max_model_len": 1000}, ["512", "1024 tokens", "max_model_len=1000", "max_model_len=1024"]),
    (
        {f"{R}.enable_chunked_prefill": False, f"{R}.max_num_batched_tokens": 1000},
        ["max_num_batched_tokens=1000", "1024 tokens", "max_num_batched_tokens=1024"],
    ),
    ({"actor_rollout_ref.model.min_pixels": 9, "actor_rollout_ref.model.max_pixels": 4}, ["9", "max_pixels=4"]),
    ({f"{R}.temperature": 0.0}, ["temperature=0.0", "more than 0", "1.0"]),
    ({f"{R}.temperature": 3.0}, ["temperature=3.0", "at most 2"]),
    ({f"{R}.val_kwargs.temperature": -1.0}, ["val_kwargs.temperature=-1.0", "0 (greedy)"]),
    ({f"{R}.top_p": 0.9}, ["top_p=0.9", "set top_p=1", "rollout_correction"]),
    ({f"{R}.top_k": 50}, ["top_k=50", "top_k=-1", "rollout_correction"]),
    ({f"{A}.clip_ratio_c": 1.0}, ["clip_ratio_c=1.0", "more than 1", "3.0"]),
    ({f"{A}.clip_ratio": 1.5}, ["clip_ratio=1.5", "less than 1"]),
    ({"algorithm.adv_estimator": "gae", "critic.enable": False}, ["adv_estimator=gae", "critic.enable=False", "null"]),
    ({"trainer.critic_warmup": 3}, ["critic_warmup=3", "adv_estimator=grpo", "critic_warmup=0"]),
    ({f"{A}.use_dynamic_bsz": False}, ["use_dynamic_bsz=False", "ppo_micro_batch_size_per_gpu"]),
    (
        {f"{A}.use_prefix_grouper": True, f"{M}.override_config": {"attn_implementation": "sdpa"}},
        ["attn_implementation=sdpa", "use_prefix_grouper=False"],
    ),
    ({"actor_rollout_ref.model.path": ""}, ["actor_rollout_ref.model.path is empty"]),
    ({"data.train_files": []}, ["data.train_files is empty"]),
    ({"data.val_files": [], "trainer.test_freq": 5}, ["test_freq=5", "data.val_files is empty"]),
    ({"data.val_files": [], "trainer.val_only": True}, ["val_only=True", "data.val_files is empty"]),
    ({"data.custom_cls.path": "a.py"}, ["data.custom_cls.name"]),
    ({"warm_start.enable": True}, ["warm_start.files"]),
    (
        {f"{R}.multi_turn.sandbox.kind": "remote"},
        ["sandbox.kind=remote", "sandbox.url", "http://localhost:8080", "None"],
    ),
    ({"trainer.resume_mode": "resume_path"}, ["resume_from_path", "global_step_N"]),
    ({"trainer.resume_from_path": "x"}, ["resume_from_path=x", "resume_mode=auto", "resume_path"]),
    ({"algorithm.adv_estimator": "gdpo"}, ["gdpo_reward_keys", "[accuracy,format]"]),
    (
        {"algorithm.gdpo_reward_keys": ["acc", "format"], "algorithm.gdpo_reward_weights": [1.0]},
        ["gdpo_reward_weights has 1 numbers for 2", "null"],
    ),
    (
        {
            "algorithm.adv_estimator": "gdpo",
            "algorithm.gdpo_reward_keys": ["acc"],
            "algorithm.use_kl_in_reward": True,
        },
        ["use_kl_in_reward=True has no effect", "use_kl_loss"],
    ),
    ({"algorithm.high_level_gamma": -0.1}, ["algorithm.high_level_gamma=-0.1", "from 0 to 1"]),
    ({"reward_model.enable": True}, ["reward_model.enable=True", "reward_model.model.path"]),
    ({**REWARD_MODEL, "reward_model.weight": 0.0, "reward_model.rule_weight": 0.0}, ["weight=0", "no reward", "1.0"]),
    ({**REWARD_MODEL, "algorithm.adv_estimator": "remax"}, ["reward_model.enable=True", "remax", "False"]),
    (
        {**REWARD_MODEL, "reward_model.model.input_tokenizer": "m", f"{R}.agent.max_turns": 2},
        ["input_tokenizer", "max_turns=2", "max_turns=1"],
    ),
    ({**REWARD_MODEL, "reward_model.max_length": 0}, ["reward_model.max_length=0", "1 or more"]),
    ({**REWARD_MODEL, "reward_model.weight": -1.0}, ["reward_model.weight=-1.0", "0 or more"]),
    (
        {**pool("critic", 4), "algorithm.adv_estimator": "gae", "critic.fsdp_config.fsdp_size": 8},
        ["critic.fsdp_config.fsdp_size=8", "critic.resource_pool.n_gpus_per_node", "4 ranks", "fsdp_size=4"],
    ),
    (
        {**pool("actor_rollout_ref.ref", 3), f"{A}.use_kl_loss": True, f"{A}.ulysses_sequence_parallel_size": 2},
        [f"{A}.ulysses_sequence_parallel_size=2", "ref.resource_pool", "3 ranks", "ulysses_sequence_parallel_size=1"],
    ),
    (
        {**REWARD_MODEL, **pool("reward_model", 3), "reward_model.ulysses_sequence_parallel_size": 2},
        ["reward_model.ulysses_sequence_parallel_size=2", "3 ranks"],
    ),
    ({"critic.resource_pool.n_gpus_per_node": 0}, ["critic.resource_pool.n_gpus_per_node=0", "1 or more"]),
    ({"algorithm.filter_groups.enable": True, f"{R}.n": 1}, ["filter_groups.enable=True", "rollout.n=1", "n=8"]),
    (
        {
            "algorithm.filter_groups.enable": True,
            "algorithm.filter_groups.metric": "seq_final_reward",
            "algorithm.use_kl_in_reward": True,
        },
        ["metric=seq_final_reward", "use_kl_in_reward=True", "metric=seq_reward"],
    ),
    (
        {"algorithm.filter_groups.enable": True, "data.gen_batch_size": 1},
        ["10 draws", "gen_batch_size=1 ", "train_batch_size=16", "gen_batch_size=null"],
    ),
    ({**ZERO_VARIANCE, f"{R}.n": 1}, ["zero_variance_filter=True", "rollout.n=1", "zero_variance_filter=False"]),
    ({**ZERO_VARIANCE, **REWARD_MODEL}, ["zero_variance_filter=True", "reward_model.enable=True gives them later"]),
    (
        {**ZERO_VARIANCE, "algorithm.filter_groups.enable": True},
        ["zero_variance_filter=True", "filter_groups.enable=True", "set one of them to False"],
    ),
    ({**ZERO_VARIANCE, "algorithm.adv_estimator": "gae"}, ["zero_variance_filter=True", "adv_estimator=gae", "grpo, "]),
    ({**ZERO_VARIANCE, "algorithm.adv_estimator": "gigpo"}, ["zero_variance_filter=True", "adv_estimator=gigpo"]),
    ({**ZERO_VARIANCE, "algorithm.use_kl_in_reward": True}, ["zero_variance_filter=True", "use_kl_in_reward=True"]),
    ({**ZERO_VARIANCE, f"{A}.policy_loss.loss_mode": "tba"}, ["zero_variance_filter=True", "loss_mode=tba"]),
    ({f"{A}.policy_loss.loss_mode": "dpo"}, ["loss_mode=dpo", "rollout.n=8", "set it to 2"]),
    ({f"{A}.policy_loss.loss_mode": "tba", f"{R}.n": 1}, ["loss_mode=tba", "rollout.n=1", "8"]),
    (
        {f"{A}.policy_loss.loss_mode": "tba", "algorithm.mask_truncated_completions": True},
        ["loss_mode=tba", "whole rows", "mask_truncated_completions=False"],
    ),
    (
        {f"{A}.policy_loss.loss_mode": "tba", "algorithm.rollout_correction.rollout_is": "token"},
        ["loss_mode=tba", "rollout_is=null"],
    ),
    ({f"{A}.policy_loss.tba_beta": 0.0}, ["policy_loss.tba_beta=0.0", "more than 0"]),
    ({f"{A}.policy_loss.dpo_label_smoothing": 0.5}, ["dpo_label_smoothing=0.5", "less than 0.5", "0.1"]),
    (
        {f"{A}.policy_loss.dpo_label_smoothing": 0.1, f"{A}.policy_loss.dpo_loss_type": "ipo"},
        ["dpo_label_smoothing=0.1", "dpo_loss_type=ipo", "sigmoid"],
    ),
    (
        {"algorithm.rollout_correction.rollout_rs": "token_k1"},
        ["rollout_correction.rollout_rs=token_k1", "needs rollout_rs_threshold", "rollout_rs=null"],
    ),
    (
        {f"{A}.policy_loss.clip_cov_lb": 5.0},
        ["policy_loss.clip_cov_lb=5.0", "below clip_cov_ub=5.0", "1.0 and 5.0"],
    ),
    ({f"{A}.policy_loss.kl_cov_ratio": 1.5}, ["policy_loss.kl_cov_ratio=1.5", "from 0 to 1"]),
    (
        {"reward_model.overlong_buffer.enable": True},
        ["overlong_buffer.len=0", "data.max_response_length=512", "set it to 128", "enable=False"],
    ),
    (
        {
            "reward_model.overlong_buffer.enable": True,
            "reward_model.overlong_buffer.len": 300,
            "reward_model.max_resp_len": 200,
        },
        ["overlong_buffer.len=300", "reward_model.max_resp_len=200", "set it to 50"],
    ),
    ({"reward_model.overlong_buffer.penalty_factor": -1.0}, ["penalty_factor=-1.0", "0 or more"]),
    ({"reward_model.reward_clip": 0.0}, ["reward_clip=0.0", "more than 0"]),
    (
        {"reward_model.reward_kwargs": {"overlong_buffer_cfg": {"enable": True}}},
        ["reward_kwargs.overlong_buffer_cfg", "write reward_model.overlong_buffer"],
    ),
    ({f"{M}.lora_rank": -1}, ["lora_rank=-1", "0 or more"]),
    ({f"{M}.lora_rank": 8, f"{M}.lora_alpha": 0}, ["lora_alpha=0", "1 or more"]),
    ({f"{M}.lora_rank": 8, f"{M}.target_modules": []}, ["target_modules is empty", "all-linear", "lora_rank=0"]),
    ({f"{M}.lora_rank": 8, f"{M}.exclude_modules": "*.visual"}, ["exclude_modules='*.visual'", "give names"]),
    ({"critic.model.target_modules": "(q"}, ["critic.model.target_modules='(q'", "target_modules=[q_proj,v_proj]"]),
    ({f"{M}.lora_adapter_path": ""}, ["lora_adapter_path is empty", "null"]),
    (
        {f"{M}.lora_adapter_path": "a", "warm_start.enable": True, "warm_start.files": ["w.parquet"]},
        ["lora_adapter_path=a", "set warm_start.enable=False"],
    ),
    ({"trainer.save_freq": 0}, ["trainer.save_freq=0", "-1 (off, all), 1 or more"]),
    ({"trainer.test_freq": -5}, ["trainer.test_freq=-5"]),
    ({f"{A}.optim.lr": -1.0}, ["optim.lr=-1.0", "0 or more"]),
    ({f"{A}.optim.lr": float("nan")}, ["optim.lr=nan"]),
    ({f"{A}.optim.betas": [0.9, 1.0]}, ["betas=[0.9, 1.0]", "below 1"]),
    ({f"{R}.gpu_memory_utilization": 1.2}, ["gpu_memory_utilization=1.2", "at most 1"]),
    ({"algorithm.gamma": 1.1}, ["algorithm.gamma=1.1", "from 0 to 1"]),
    ({"data.prompt_key": ""}, ["data.prompt_key"]),
    ({"algorithm.adv_estimator": "grop"}, ["algorithm.adv_estimator=grop", "grpo, grpo_passk, grpo_turn"]),
    ({f"{A}.loss_agg_mode": "mean"}, ["loss_agg_mode=mean", "seq-mean-token-mean, seq-mean-token-sum"]),
    ({f"{A}.policy_loss.loss_mode": "x"}, ["loss_mode=x", "cispo, clip_cov, dpo"]),
    ({f"{A}.kl_loss_type": "k9"}, ["kl_loss_type=k9", "kl, kl+, low_var_kl"]),
    ({"algorithm.kl_penalty": "k9"}, ["kl_penalty=k9"]),
    ({"trainer.logger": ["console", "swanlab"]}, ["trainer.logger=swanlab", "console, tensorboard, wandb"]),
]


@pytest.mark.parametrize(("changes", "parts"), FAULTS, ids=lambda value: next(iter(value)) if value else "")
def test_a_fault_is_named_with_numbers_and_a_way_out(changes: dict[str, Any], parts: list[str]):
    message = faults(changes)
    assert [part for part in parts if part not in message] == []


def test_all_faults_are_said_at_once():
    message = faults({f"{R}.temperature": 0.0, f"{A}.clip_ratio_c": 0.5, "trainer.logger": ["x"]})
    assert len(message.splitlines()) == 3


def test_rows_need_not_divide_by_the_ranks():
    odd = {"data.train_batch_size": 7, f"{A}.ppo_mini_batch_size": 7, f"{R}.n": 3}
    assert check(config_with(odd)) == ()


def test_truncated_sampling_is_possible_with_importance_weights():
    corrected = {"algorithm.rollout_correction.rollout_is": "token"}
    assert check(config_with({f"{R}.top_p": 0.9} | corrected)) == ()
    assert check(config_with({f"{R}.top_k": 50} | corrected)) == ()


def test_thresholds_are_numbers_or_two_numbers_as_text():
    for threshold in (3, 2.5, "0.5_2.0"):
        config = config_with({"algorithm.rollout_correction.rollout_is_threshold": threshold})
        assert config.algorithm.rollout_correction.rollout_is_threshold == threshold


WARNINGS = [
    ({"trainer.balance_batch": False}, ["trainer.balance_batch=False has no effect"]),
    ({"reward_model.reward_manager": "dapo"}, ["reward_model.reward_manager=dapo has no effect"]),
    ({f"{R}.agent.environments": {"zoom": {"class": "a:B"}}}, ["agent.environments", "max_turns=1", "max_turns=4"]),
    ({f"{R}.n": 1}, ["adv_estimator=grpo", "rollout.n=1", "n=8"]),
    ({"algorithm.adv_estimator": "grpo_turn", f"{R}.n": 1}, ["adv_estimator=grpo_turn", "rollout.n=1"]),
    ({"algorithm.gdpo_reward_keys": ["acc"]}, ["gdpo_reward_keys has no effect", "adv_estimator=grpo"]),
    ({"critic.enable": True}, ["critic.enable=True", "adv_estimator=grpo"]),
    ({f"{A}.use_kl_loss": True, "algorithm.use_kl_in_reward": True}, ["use_kl_loss", "use_kl_in_reward"]),
    (
        {f"{A}.policy_loss.loss_mode": "tba", "algorithm.adv_estimator": "gae"},
        ["loss_mode=tba reads no advantages", "adv_estimator=gae", "adv_estimator=grpo"],
    ),
    ({f"{A}.policy_loss.loss_mode": "tba", f"{A}.use_kl_loss": True}, ["loss_mode=tba", "KL counts twice"]),
    ({"data.train_batch_size": 1, f"{A}.ppo_mini_batch_size": 1, f"{R}.n": 2}, ["2 rows", "8 ranks"]),
    (
        {f"{A}.use_prefix_grouper": True, f"{R}.n": 1, "algorithm.adv_estimator": "reinforce_plus_plus"},
        ["use_prefix_grouper=True", "rollout.n=1"],
    ),
    ({f"{A}.ppo_max_token_len_per_gpu": 1000}, ["1024 tokens", "1000", "alone"]),
    ({f"{A}.ppo_micro_batch_size_per_gpu": 4}, ["ppo_micro_batch_size_per_gpu=4 has no effect", "use_dynamic_bsz"]),
    ({"trainer.nnodes": 2}, ["nnodes=2", "ray_kwargs.ray_init.address=auto"]),
    ({"data.val_files": []}, ["data.val_files is empty"]),
    ({"data.gen_batch_size": 4}, ["gen_batch_size"]),
    (pool("critic", 1), ["critic.resource_pool.enable=True has no effect", "no critic"]),
    ({"critic.resource_pool.n_gpus_per_node": 2}, ["critic.resource_pool has a size", "enable=False"]),
    ({**REWARD_MODEL, **pool("reward_model", 200)}, ["128 rows", "reward_model.resource_pool", "200 ranks"]),
    ({"reward_model.weight": 0.5}, ["reward_model.weight has no effect", "enable=True"]),
    (
        {**REWARD_MODEL, "reward_model.rule_weight": 0.0, "custom_reward_function.path": "r.py"},
        ["custom_reward_function.path has no effect", "rule_weight=0"],
    ),
    ({f"{M}.lora_alpha": 32}, ["lora_alpha without effect", "lora_rank=0"]),
    (
        {"critic.model.lora_adapter_path": "a", "critic.model.target_modules": ["q_proj"]},
        ["critic.model: target_modules without effect", "lora_adapter_path"],
    ),
    (
        {f"{M}.lora_rank": 8, f"{A}.use_kl_loss": True, "actor_rollout_ref.ref.fsdp_config.param_offload": True},
        ["actor_rollout_ref.ref", "without its adapter", "but for log_prob_*"],
    ),
    ({f"{M}.lora_adapter_path": "a", f"{A}.use_kl_loss": True}, ["lora_adapter_path=a", "does not start at zero"]),
    (
        {
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_is_threshold": 0.52,
        },
        ["rollout_is_threshold=0.52", "in quotes", "'0.5_2'"],
    ),
]


@pytest.mark.parametrize(("changes", "parts"), WARNINGS, ids=lambda value: next(iter(value)) if value else "")
def test_what_is_odd_but_possible_is_a_warning(changes: dict[str, Any], parts: list[str]):
    (warning,) = check(config_with(changes))
    assert [part for part in parts if part not in warning] == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.custom_cls.path", "rows.py"),
    ],
)
def test_what_this_version_does_not_carry_out_is_refused(key: str, value: object):
    found = faults({key: value})
    assert key in found
    assert "not supported" in found


def test_the_machine_must_have_what_is_asked_for():
    assert "machine has 2 GPUs: set it to 2" in faults({}, Machine(gpus=2, cores=64))
    assert "no GPU: set trainer.device=cpu" in faults({"trainer.device": "cuda"}, Machine(gpus=0, cores=2))
    (warning,) = check(config_with({}), Machine(gpus=0, cores=2))
    assert "8 ranks" in warning
    assert "2 cores" in warning
    assert check(config_with({"trainer.device": "cpu"}), Machine(gpus=1, cores=64)) == ()


def test_the_machine_must_hold_all_pools_together():
    two = {**pool("critic", 2), "algorithm.adv_estimator": "gae"}
    message = faults(two, Machine(gpus=8, cores=64))
    assert "trainer.n_gpus_per_node=8 + critic.resource_pool.n_gpus_per_node=2 = 10 GPUs" in message
    assert "set trainer.n_gpus_per_node=6" in message
    elsewhere = {**two, "ray_kwargs.ray_init.address": "auto"}  # the critic may find a node of its own
    assert check(config_with(elsewhere), Machine(gpus=8, cores=64)) == ()
    (warning,) = check(config_with(two), Machine(gpus=0, cores=9))
    assert "8 ranks and 2 of other pools" in warning
    assert check(config_with(two), Machine(gpus=0, cores=10)) == ()


@pytest.mark.parametrize(
    ("query", "kv", "fit", "misfit"),
    [(28, 4, (1, 2, 4, 28), (3, 7, 8)), (40, 8, (1, 8, 40), (16, 5)), (14, 2, (1, 2, 14), (4, 7))],
)
def test_heads_and_parallel_size(query: int, kv: int, fit: tuple[int, ...], misfit: tuple[int, ...]):
    key = f"{A}.ulysses_sequence_parallel_size"
    for size in fit:
        check_heads(query, kv, size, key)
    for size in misfit:
        with pytest.raises(ConfigError) as error:
            check_heads(query, kv, size, key)
        assert f"{key}={size} does not fit a model with {query} query and {kv} key-value heads" in str(error.value)
        assert not heads_fit(query, kv, size)


def test_largest_divisor():
    assert [largest_divisor(20, limit) for limit in (1, 3, 8, 20, 99)] == [1, 2, 5, 20, 20]


def test_every_key_without_effect_is_a_setting():
    assert [key for key in WITHOUT_EFFECT if key not in key_types()] == []


def test_every_key_with_a_range_is_a_setting():
    assert [key for keys, _, _ in LIMITS for key in keys if key not in key_types()] == []


def test_every_number_has_a_range():
    numbers = {key for key, kind in key_types().items() if kind in (int, float, int | None, float | None)}
    ruled = {
        f"{A}.clip_ratio_c",
        f"{R}.temperature",
        f"{R}.val_kwargs.temperature",
    }
    assert numbers - {key for keys, _, _ in LIMITS for key in keys} == ruled
