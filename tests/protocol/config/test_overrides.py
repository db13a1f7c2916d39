"""Override lists as people type them, verl's scripts among them."""

import pytest

from vrl.protocol.config.keys import in_open, is_open, key_types, leaf_keys
from vrl.protocol.config.legacy import DROPPED, NEUTRAL, RENAMED
from vrl.protocol.config.overrides import normalise
from vrl.protocol.errors import ConfigError

A, R, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"

# What published scripts of verl and of systems built on it set, by how often they set it.
SCRIPT = [
    "trainer.experiment_name=geo3k",
    "trainer.project_name=verl",
    "data.train_files=['a.parquet','b.parquet']",
    "data.val_files=c.parquet",
    'trainer.logger=\'["console","wandb"]\'',
    "trainer.total_epochs=15",
    "data.train_batch_size=512",
    "data.val_batch_size=64",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
    "trainer.save_freq=20",
    "trainer.test_freq=5",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.model.lora_rank=64",
    "actor_rollout_ref.model.lora_alpha=32",
    "actor_rollout_ref.model.target_modules=all-linear",
    "actor_rollout_ref.model.exclude_modules='.*visual.*'",
    "actor_rollout_ref.hybrid_engine=True",
    "data.max_prompt_length=1024",
    "data.max_response_length=2048",
    "data.truncation=error",
    "data.filter_overlong_prompts=True",
    "data.return_raw_chat=True",
    "data.prompt_key=prompt",
    "data.image_key=images",
    "data.shuffle=False",
    f"{R}.name=vllm",
    f"{R}.mode=async",
    f"{R}.tensor_model_parallel_size=2",
    f"{R}.gpu_memory_utilization=0.6",
    f"{R}.n=5",
    f"{R}.temperature=1.0",
    f"{R}.top_p=1.0",
    f"{R}.top_k=-1",
    f"{R}.enforce_eager=False",
    f"{R}.free_cache_engine=False",
    f"{R}.enable_chunked_prefill=False",
    f"{R}.load_format=dummy_dtensor",
    f"{R}.layered_summon=True",
    f"{R}.max_num_batched_tokens=8192",
    f"{R}.max_model_len=3072",
    f"{R}.max_num_seqs=256",
    f"{R}.calculate_log_probs=True",
    f"{R}.log_prob_micro_batch_size_per_gpu=20",
    f"{R}.log_prob_max_token_len_per_gpu=32768",
    f"{R}.log_prob_use_dynamic_bsz=True",
    f"{R}.val_kwargs.temperature=0.4",
    f"{R}.val_kwargs.do_sample=True",
    f"{R}.val_kwargs.n=1",
    f"{R}.val_kwargs.top_p=0.7",
    f"{R}.agent.activate_agent=True",
    f"{R}.agent.max_turns=5",
    f"{R}.agent.concurrent_workers=4",
    f"{R}.agent.single_response_max_tokens=10240",
    f"+{R}.agent.single_obs_max_length=8192",
    f"+{R}.engine_kwargs.vllm.disable_mm_preprocessor_cache=True",
    f"{R}.multi_turn.tool_config_path=tools.yaml",
    f"{A}.strategy=fsdp2",
    f"{A}.ppo_mini_batch_size=128",
    f"{A}.ppo_micro_batch_size_per_gpu=10",
    f"{A}.use_dynamic_bsz=True",
    f"{A}.ppo_max_token_len_per_gpu=24576",
    f"{A}.ppo_epochs=1",
    f"{A}.optim.lr=1e-6",
    f"{A}.optim.lr_warmup_steps=10",
    f"{A}.optim.weight_decay=0.1",
    f"{A}.optim.warmup_style=cosine",
    f"{A}.grad_clip=1.0",
    f"{A}.clip_ratio_low=0.2",
    f"{A}.clip_ratio_high=0.28",
    f"{A}.clip_ratio_c=10.0",
    f"{A}.loss_agg_mode=token-mean",
    f"{A}.policy_loss.loss_mode=gspo",
    f"{A}.entropy_coeff=0",
    f"{A}.use_kl_loss=True",
    f"{A}.kl_loss_coef=0.01",
    f"{A}.kl_loss_type=low_var_kl",
    f"{A}.use_torch_compile=False",
    f"{A}.ulysses_sequence_parallel_size=1",
    f"{A}.checkpoint.contents=['model','hf_model','optimizer','extra']",
    f"{A}.fsdp_config.param_offload=False",
    f"{A}.fsdp_config.optimizer_offload=False",
    f"{A}.fsdp_config.grad_offload=False",
    f"{A}.fsdp_config.fsdp_size=-1",
    f"{REF}.log_prob_micro_batch_size_per_gpu=20",
    f"{REF}.log_prob_use_dynamic_bsz=True",
    f"{REF}.fsdp_config.param_offload=True",
    f"{REF}.ulysses_sequence_parallel_size=1",
    "critic.model.path=Qwen/Qwen2.5-VL-7B-Instruct",
    "critic.model.use_remove_padding=True",
    "critic.model.fsdp_config.param_offload=False",
    "critic.optim.lr=1e-5",
    "critic.ppo_micro_batch_size_per_gpu=4",
    "critic.cliprange_value=0.5",
    "algorithm.adv_estimator=grpo",
    "algorithm.gamma=0.95",
    "algorithm.use_kl_in_reward=False",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "algorithm.filter_groups.enable=False",
    "custom_reward_function.path=reward.py",
    "custom_reward_function.name=compute",
    "reward_model.enable=False",
    "reward_model.reward_manager=dapo",
    "reward_model.overlong_buffer.enable=True",
    "+reward_model.reward_kwargs.overlong_buffer_cfg.len=4096",
    "+reward_model.reward_kwargs.overlong_buffer_cfg.log=False",
    "+reward_model.reward_kwargs.max_resp_len=20480",
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.bypass_mode=False",
    "trainer.critic_warmup=0",
    "+trainer.val_before_train=False",
    "+trainer.val_only=False",
    "+trainer.tensorboard_dir=tb",
    "trainer.default_local_dir=runs/geo3k",
    "trainer.default_hdfs_dir=null",
    "trainer.resume_mode=auto",
    "trainer.resume_from_path=False",
    "trainer.log_val_generations=10",
    "trainer.balance_batch=True",
    "trainer.device=cuda",
    "trainer.total_training_steps=100",
    "+debug=True",
    "ray_init.num_cpus=16",
]


def test_a_published_script_is_understood():
    done = normalise(SCRIPT)
    keys = [text.removeprefix("++").partition("=")[0] for text in done.overrides]
    assert [key for key in keys if key not in key_types() and not in_open(key)] == []
    assert len(done.overrides) + sum("has no effect" in note for note in done.notes) == len(SCRIPT)
    assert f"++{R}.multi_turn.max_tool_response_length=8192" in done.overrides
    assert sum(note.endswith("it counts characters and not tokens") for note in done.notes) == 1
    assert "++ray_kwargs.ray_init.num_cpus=16" in done.overrides
    assert "++trainer.resume_from_path=null" in done.overrides
    assert "++reward_model.overlong_buffer.len=4096" in done.overrides
    assert "++reward_model.max_resp_len=20480" in done.overrides


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_a_known_key_is_accepted_behind_any_sign(sign: str):
    assert normalise([f"{sign}trainer.total_epochs=3"]).overrides == ("++trainer.total_epochs=3",)


@pytest.mark.parametrize("key", leaf_keys())
def test_two_swapped_letters_in_any_key_are_refused_with_the_right_name(key: str):
    middle = len(key) - len(key.rpartition(".")[2]) // 2 - 1
    typo = key[: middle - 1] + key[middle] + key[middle - 1] + key[middle + 1 :]
    if typo == key or typo in key_types():
        typo = f"{key}x"
    with pytest.raises(ConfigError) as error:
        normalise([f"{typo}=1"])
    assert str(error.value) == f"{typo}: unknown setting; did you mean {key}?"


@pytest.mark.parametrize("sign", ["", "+", "++", "~"])
def test_an_unknown_key_is_refused_behind_any_sign(sign: str):
    with pytest.raises(ConfigError, match=r"did you mean trainer\.total_epochs\?"):
        normalise([f"{sign}trainer.total_epoch=3"])


@pytest.mark.parametrize("key", [key for key in leaf_keys() if is_open(key)])
def test_anything_is_accepted_below_an_open_dictionary(key: str):
    typed = [f"{key}.some.thing=1", f"{key}={{a: 1}}"]
    assert normalise(typed).overrides == tuple(f"++{text}" for text in typed)


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("critic.model.fsdp_config.param_offload=True", "++critic.fsdp_config.param_offload=True"),
        (f"{A}.ppo_micro_batch_size=8", f"++{A}.ppo_micro_batch_size_per_gpu=8"),
        (f"+{A}.optim.warmup_style=cosine", f"++{A}.optim.lr_scheduler_type=cosine"),
        ("trainer.val_generations_to_log_to_wandb=5", "++trainer.log_val_generations=5"),
        ("reward.custom_reward_function.path=r.py", "++custom_reward_function.path=r.py"),
        ("reward.num_workers=4", "++reward_model.num_workers=4"),
        ("reward_model.enable_resource_pool=True", "++reward_model.resource_pool.enable=True"),
        ("reward.reward_model.n_gpus_per_node=4", "++reward_model.resource_pool.n_gpus_per_node=4"),
        ("reward_model.model.fsdp_config.fsdp_size=2", "++reward_model.fsdp_config.fsdp_size=2"),
        (f"~{A}.optim.warmup_style", f"~{A}.optim.lr_scheduler_type"),
    ],
)
def test_an_old_name_is_replaced_and_said(typed: str, written: str):
    done = normalise([typed])
    assert done.overrides == (written,)
    old = typed.lstrip("+~").partition("=")[0]
    new = written.lstrip("+~").partition("=")[0]
    assert done.notes == (f"{old} is {new} here",)


@pytest.mark.parametrize(
    "typed",
    [
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.hybrid_engine=True",
        "critic.model.fsdp_config.grad_offload=True",
        "reward_model.model.use_remove_padding=True",
        "reward_model.strategy=fsdp",
        f"{A}.fsdp_config.wrap_policy.min_num_params=0",
        "~actor_rollout_ref.model.use_remove_padding",
        "hydra.run.dir=x",
    ],
)
def test_a_key_without_effect_is_left_out_and_said(typed: str):
    done = normalise([typed])
    assert done.overrides == ()
    assert len(done.notes) == 1
    assert "has no effect: " in done.notes[0]


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("actor_rollout_ref.model.lora.rank=8", "LoRA is set by lora_rank"),
        (f"{A}.strategy=megatron", "FSDP2 is the only way"),
        (f"{A}.megatron.tensor_model_parallel_size=2", "no Megatron backend"),
        ("trainer.default_hdfs_dir=hdfs://x", "trainer.default_local_dir"),
        (f"{R}.do_sample=False", "training samples"),
        ("env.env_name=alfworld", "env_name"),
        ("reward.reward_model.rollout.name=vllm", "a sequence classifier in FSDP, without an engine"),
    ],
)
def test_a_key_without_counterpart_is_refused_where_it_would_matter(typed: str, reason: str):
    with pytest.raises(ConfigError, match=reason):
        normalise([typed])


@pytest.mark.parametrize("typed", ["x", "trainer.seed", "a = b", "=3", "--lr", ""])
def test_what_is_no_override_is_refused(typed: str):
    with pytest.raises(ConfigError, match="write key=value"):
        normalise([typed])


def test_an_old_and_a_new_name_with_two_values_contradict_each_other():
    old, new = "trainer.val_generations_to_log_to_wandb", "trainer.log_val_generations"
    with pytest.raises(ConfigError, match=f"{old}=5 and {new}=6 are the same setting"):
        normalise([f"{old}=5", f"{new}=6"])
    assert normalise([f"{old}=5", f"{new}=5"]).overrides == (f"++{new}=5",) * 2
    assert normalise([f"{new}=5", f"{new}=6"]).overrides == (f"++{new}=5", f"++{new}=6")


def test_groups_and_removals_pass():
    typed = ["model=qwen", "+model@critic.model=qwen", "~model", "~trainer.logger", "env/tools=a"]
    assert normalise(typed, groups={"model", "env"}).overrides == tuple(typed)


def test_values_keep_their_form():
    value = "{a: [1, 'x=y'], b: \"c d\"}"
    assert normalise([f"actor_rollout_ref.model.override_config={value}"]).overrides[0].endswith(f"={value}")
    assert normalise([f"{A}.fsdp_config.dtype=bf16"]).overrides == (f"++{A}.fsdp_config.dtype=bfloat16",)


def test_the_tables_agree_with_the_settings():
    for old, new in RENAMED.items():
        assert new in key_types() or in_open(new), new
        assert old not in key_types(), old
    assert not (set(DROPPED) | set(NEUTRAL)) & set(key_types())
    assert not set(DROPPED) & set(NEUTRAL)
    assert not set(RENAMED) & (set(DROPPED) | set(NEUTRAL))
