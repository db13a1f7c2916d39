"""What became of verl's keys: renamed, without effect, or possible with a neutral value only.

Tables hold exact keys or whole sections; the longest entry wins. verl's scripts set these keys, so they are answered
one by one instead of being called unknown. `overrides` and `builder` look them up.
"""

from vrl.protocol.config.keys import nearest, parents

_ACTOR, _CRITIC, _REF = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref"
_MODEL, _ROLLOUT, _AGENT = "actor_rollout_ref.model", "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.agent"

RENAMED = {
    f"{_ACTOR}.ppo_micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{_ACTOR}.optim.warmup_style": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.optim.clip_grad": f"{_ACTOR}.grad_clip",
    f"{_ACTOR}.checkpoint.contents": f"{_ACTOR}.checkpoint.save_contents",
    f"{_ACTOR}.dpo_beta": f"{_ACTOR}.policy_loss.dpo_beta",
    f"{_ACTOR}.freeze_vision_tower": f"{_MODEL}.freeze_vision_tower",
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": f"{_ACTOR}.ulysses_sequence_parallel_size",
    f"{_REF}.log_prob_micro_batch_size": f"{_REF}.log_prob_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.log_prob_micro_batch_size": f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{_ROLLOUT}.response_length": "data.max_response_length",
    f"{_ROLLOUT}.max_tokens": f"{_AGENT}.single_response_max_tokens",
    f"{_ROLLOUT}.rollout_log_dir": "trainer.rollout_data_dir",
    f"{_ROLLOUT}.multi_turn.max_turns": f"{_AGENT}.max_turns",
    f"{_ROLLOUT}.multi_turn.max_assistant_turns": f"{_AGENT}.max_turns",
    f"{_AGENT}.max_vllm_images": f"{_ROLLOUT}.limit_images",
    f"{_AGENT}.single_obs_max_length": f"{_ROLLOUT}.multi_turn.max_tool_response_length",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.model.fsdp_config": "critic.fsdp_config",
    "critic.fsdp": "critic.fsdp_config",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.optim.clip_grad": "critic.grad_clip",
    "critic.checkpoint.contents": "critic.checkpoint.save_contents",
    "data.train_file": "data.train_files",
    "data.val_file": "data.val_files",
    "data.tokenizer": f"{_MODEL}.tokenizer_path",
    "data.trust_remote_code": f"{_MODEL}.trust_remote_code",
    "reward.num_workers": "reward_model.num_workers",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_kwargs": "reward_model.reward_kwargs",
    "reward.custom_reward_function": "custom_reward_function",
    "reward.reward_model.enable": "reward_model.enable",
    "reward.reward_model.model_path": "reward_model.model.path",
    **{
        f"{section}.{old}": f"reward_model.resource_pool.{new}"
        for section in ("reward_model", "reward.reward_model")
        for old, new in (
            ("enable_resource_pool", "enable"),
            ("n_gpus_per_node", "n_gpus_per_node"),
            ("nnodes", "nnodes"),
        )
    },
    "reward_model.model.fsdp_config": "reward_model.fsdp_config",
    "reward_model.micro_batch_size": "reward_model.micro_batch_size_per_gpu",
    "reward_model.reward_kwargs.overlong_buffer_cfg": "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.max_resp_len": "reward_model.max_resp_len",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
    "trainer.ray_wait_register_center_timeout": "trainer.worker_start_timeout",
    "ray_init": "ray_kwargs.ray_init",
}

# What else is different about a renamed key.
OTHER_UNITS = {f"{_AGENT}.single_obs_max_length": "it counts characters and not tokens"}

_PACKED = "rows are always packed without padding"
_BUDGET = "actor_rollout_ref.actor.use_dynamic_bsz and the token budgets hold for all roles"
_SHARDING = "FSDP2 shards layer by layer and needs no such choice"
_ROWS = "every row carries its messages, images and lengths"
_ENGINE = "the engine is set up so that it agrees with the learner"
_CHUNKS = "log-probs and entropy are always computed in chunks and logged"
_SPEED = "a choice of speed or memory that has no counterpart here; results are the same"

DROPPED = {
    "actor_rollout_ref.hybrid_engine": "engine and learner always share their processes",
    "actor_rollout_ref.nccl_timeout": _SPEED,
    f"{_MODEL}.use_remove_padding": _PACKED,
    f"{_MODEL}.use_fused_kernels": _CHUNKS,
    f"{_MODEL}.fused_kernel_options": _CHUNKS,
    f"{_MODEL}.use_shm": _SPEED,
    f"{_MODEL}.tiled_mlp": _SPEED,
    f"{_ACTOR}.use_torch_compile": _SPEED,
    f"{_ACTOR}.use_remove_padding": _PACKED,
    f"{_ACTOR}.calculate_entropy": _CHUNKS,
    f"{_ACTOR}.calculate_sum_pi_squared": "it is calculated where algorithm.adv_estimator needs it",
    f"{_ACTOR}.entropy_from_logits_with_chunking": _CHUNKS,
    f"{_ACTOR}.entropy_checkpointing": _CHUNKS,
    f"{_ACTOR}.data_loader_seed": "trainer.seed is the seed of mini-batches",
    f"{_ACTOR}.invalid_action_penalty_coef": "the penalty is off",
    f"{_ACTOR}.optim.total_training_steps": "the trainer knows the number of steps",
    f"{_REF}.log_prob_use_dynamic_bsz": _BUDGET,
    f"{_REF}.ulysses_sequence_parallel_size": "the reference shares rows as the actor does",
    f"{_REF}.use_torch_compile": _SPEED,
    f"{_ROLLOUT}.log_prob_use_dynamic_bsz": _BUDGET,
    f"{_ROLLOUT}.mode": "the engine always runs in the worker's process",
    f"{_ROLLOUT}.load_format": _ENGINE,
    f"{_ROLLOUT}.layered_summon": "weights always travel in buckets",
    f"{_ROLLOUT}.disable_log_stats": _ENGINE,
    f"{_ROLLOUT}.skip_tokenizer_init": _ENGINE,
    f"{_ROLLOUT}.scheduling_policy": _ENGINE,
    f"{_ROLLOUT}.logprobs_mode": _ENGINE,
    f"{_ROLLOUT}.calculate_log_probs": "log-probs of sampled tokens are always kept",
    f"{_ROLLOUT}.multi_stage_wake_up": "the engine always wakes in stages",
    f"{_ROLLOUT}.data_parallel_size": "every engine is a replica: ranks divided by tensor_model_parallel_size",
    f"{_ROLLOUT}.send_interval": _ENGINE,
    f"{_ROLLOUT}.prometheus": _SPEED,
    f"{_ROLLOUT}.multi_turn.enable": "a row says by env_name whether it uses tools",
    f"{_ROLLOUT}.multi_turn.tokenization_sanity_check_mode": "sampled ids are never encoded again",
    f"{_ROLLOUT}.multi_turn.use_inference_chat_template": "sampled ids are never encoded again",
    f"{_AGENT}.activate_agent": "a row says by env_name whether it uses tools",
    f"{_AGENT}.tool_name_key": "the column is env_name",
    f"{_AGENT}.num_workers": "episodes run in the rollout workers",
    f"{_AGENT}.default_agent_loop": "a row says by env_name whether it uses tools",
    f"{_AGENT}.show_tqdm": _SPEED,
    f"{_AGENT}.vl_model_path": "the policy's own processor is used",
    "critic.model.use_remove_padding": _PACKED,
    "critic.use_remove_padding": _PACKED,
    "critic.model.tokenizer_path": "the policy's tokenizer and processor are used",
    "critic.use_dynamic_bsz": _BUDGET,
    "critic.forward_micro_batch_size": _BUDGET,
    "critic.forward_micro_batch_size_per_gpu": _BUDGET,
    "critic.forward_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu holds for both passes",
    "critic.rollout_n": "mini-batches count prompts",
    "critic.shuffle": "mini-batches are the actor's",
    "critic.data_loader_seed": "trainer.seed is the seed of mini-batches",
    "critic.optim.total_training_steps": "the trainer knows the number of steps",
    "data.return_raw_chat": _ROWS,
    "data.return_raw_input_ids": _ROWS,
    "data.return_full_prompt": _ROWS,
    "data.return_multi_modal_inputs": _ROWS,
    "data.image_patch_size": "the processor of the model knows it",
    "data.video_key": "videos are not read",
    "data.audio_key": "sound is not read",
    "data.use_shm": _SPEED,
    "data.dataloader_num_workers": "rows are small until an image is needed and are read in the driver",
    "data.val_batch_size": "all held-out rows are always sent at once",
    "data.validation_shuffle": "held-out rows keep the order of the file",
    "reward_model.launch_reward_fn_async": "rewards always run beside generation",
    "reward.launch_reward_fn_async": "rewards always run beside generation",
    "reward_model.model.use_remove_padding": _PACKED,
    "reward_model.model.use_fused_kernels": _CHUNKS,
    "reward_model.model.external_lib": "reward_model.model.trust_remote_code runs the model folder's own code",
    "reward_model.use_dynamic_bsz": _BUDGET,
    "reward_model.overlong_buffer.log": "what the penalty does is always logged",
    "algorithm.pf_ppo": "preference feedback is off",
    "algorithm.gigpo.similarity_thresh": "states are the same or they are not",
    "trainer.max_critic_ckpt_to_keep": "actor and critic are in one checkpoint: trainer.max_actor_ckpt_to_keep",
    "trainer.remove_previous_ckpt_in_save": "trainer.max_actor_ckpt_to_keep says how many are kept",
    "trainer.del_local_ckpt_after_load": "checkpoints are read where they are",
    "trainer.esi_redundant_time": "a run is saved every trainer.save_freq steps",
    "trainer.tensorboard_dir": "tensorboard writes to the run folder",
    "trainer.use_v1": "there is one trainer",
    "global_profiler": "timings are in metrics.jsonl",
    "debug": "it had no effect",
    "vs_debug": "it had no effect",
    "hydra": "the run folder is trainer.default_local_dir",
} | {
    f"{section}.{name}": reason
    for section in (
        *(f"{_ACTOR}.fsdp_config", f"{_REF}.fsdp_config", "critic.fsdp_config", "critic.model.fsdp_config"),
        "reward_model.fsdp_config",
    )
    for name, reason in (
        ("grad_offload", "gradients stay with the parameters"),
        ("wrap_policy", _SHARDING),
        ("forward_prefetch", _SHARDING),
        ("use_orig_params", _SHARDING),
        ("offload_policy", "param_offload and optimizer_offload say what is offloaded"),
        ("model_dtype", "master weights are float32; fsdp_config.dtype is the dtype of computation"),
        ("seed", "trainer.seed is the seed"),
        ("full_determinism", "trainer.deterministic says so"),
    )
}

_OFF = ("false", "null", "none", "0", "{}", "[]")
_OPTIMIZER = "optim.optimizer is AdamW or DeepSpeedCPUAdam, and each is in one package"
_FSDP = (("fsdp", "fsdp2"), "FSDP2 is the only way of sharding")
NEUTRAL = {
    f"{_ACTOR}.strategy": _FSDP,
    f"{_REF}.strategy": _FSDP,
    "critic.strategy": _FSDP,
    "reward_model.strategy": _FSDP,
    f"{_ACTOR}.fsdp_config.strategy": _FSDP,
    "critic.fsdp_config.strategy": _FSDP,
    f"{_ACTOR}.optim.optimizer_impl": (("torch.optim",), _OPTIMIZER),
    "critic.optim.optimizer_impl": (("torch.optim",), _OPTIMIZER),
    f"{_ACTOR}.use_invalid_action_penalty": (_OFF, "invalid actions are the reward function's business"),
    f"{_ACTOR}.megatron": ((), "there is no Megatron backend: use the keys of fsdp_config"),
    f"{_REF}.megatron": ((), "there is no Megatron backend: use the keys of fsdp_config"),
    "critic.megatron": ((), "there is no Megatron backend: use the keys of fsdp_config"),
    "reward_model.megatron": ((), "there is no Megatron backend: use the keys of fsdp_config"),
    "reward.reward_model": ((), "a reward model is a sequence classifier in FSDP, without an engine: see reward_model"),
    f"{_MODEL}.lora": (_OFF, "LoRA is set by lora_rank, lora_alpha and target_modules beside it"),
    f"{_MODEL}.custom_chat_template": (_OFF, "the template of the model folder is used: put it into tokenizer_path"),
    f"{_ROLLOUT}.do_sample": (("true",), "training samples; greedy evaluation is val_kwargs.do_sample=False"),
    f"{_ROLLOUT}.use_fire_sampling": (_OFF, "every token is sampled at one temperature"),
    f"{_ROLLOUT}.over_sample_rate": (_OFF, "exactly n samples a prompt are drawn"),
    f"{_ROLLOUT}.quantization": (_OFF, "the engine holds the learner's weights; see rollout.dtype"),
    f"{_ROLLOUT}.enable_rollout_routing_replay": (_OFF, "mixture-of-experts routing is not replayed"),
    f"{_ROLLOUT}.pipeline_model_parallel_size": (("1",), "engines are parallel by tensor only"),
    f"{_ROLLOUT}.expert_parallel_size": (("1",), "engines are parallel by tensor only"),
    f"{_ROLLOUT}.nnodes": (_OFF, "the engines live on the trainer's ranks"),
    f"{_ROLLOUT}.n_gpus_per_node": (_OFF, "the engines live on the trainer's ranks"),
    "data.apply_chat_template_kwargs": (_OFF, "the chat template is used as it is"),
    "data.sampler": (_OFF, "rows come in seeded random order (data.shuffle, data.seed)"),
    "data.datagen": (_OFF, "rows come from files"),
    "algorithm.use_pf_ppo": (_OFF, "preference feedback is not supported"),
    "algorithm.rollout_correction.bypass_mode": (_OFF, "old log-probs are always the learner's"),
    "algorithm.rollout_correction.loss_type": (("ppo_clip",), "the loss is actor.policy_loss.loss_mode"),
    "algorithm.gigpo.enable_similarity": (_OFF, "states are the same or they are not"),
    "algorithm.filter_groups.max_inflight_gen_batches": (("1",), "one draw of prompts is generated at a time"),
    "algorithm.rounds_ctrl": ((), "the turn limit is fixed: actor_rollout_ref.rollout.agent.max_turns"),
    "actor_rollout_ref.agentgym": ((), "environment servers are not supported in this version"),
    "env": ((), "environments are chosen by a row's env_name"),
    "reward_model.sandbox_fusion": (_OFF, "rewards run in local processes"),
    "reward.sandbox_fusion": (_OFF, "rewards run in local processes"),
    "trainer.default_hdfs_dir": (_OFF, "checkpoints go to the run folder, trainer.default_local_dir"),
    "transfer_queue": (_OFF, "batches travel through Ray"),
    "distillation": (_OFF, "there is no distillation"),
    "async_training": ((), "generation and training take turns"),
}


def renamed(key: str) -> str | None:
    """Return today's name of an old key, or None."""
    for parent in parents(key):
        if parent in RENAMED:
            return RENAMED[parent] + key[len(parent) :]
    return None


def other_unit(key: str) -> str:
    """Return what to add to a message on a renamed key whose numbers mean something else today; mostly nothing."""
    return f"; {OTHER_UNITS[key]}" if key in OTHER_UNITS else ""


def dropped(key: str) -> str | None:
    """Return why a key has no effect, or None."""
    return next((DROPPED[parent] for parent in parents(key) if parent in DROPPED), None)


def neutral(key: str) -> tuple[tuple[str, ...], str] | None:
    """Return the values (lower case) that a key without counterpart may have and why no other, or None."""
    return next((NEUTRAL[parent] for parent in parents(key) if parent in NEUTRAL), None)


def explain_unknown(key: str) -> str:
    """Return the message for a key that is not a setting."""
    new_name, reason, only = renamed(key), dropped(key), neutral(key)
    if new_name:
        return f"{key}: write {new_name}{other_unit(key)}"
    if reason:
        return f"{key}: leave it out; {reason}"
    if only:
        return f"{key}: leave it out; {only[1]}"
    near = " or ".join(nearest(key))
    hint = f"did you mean {near}?" if near else "configs/ppo_trainer.yaml lists all settings"
    return f"{key}: unknown setting; {hint}"
