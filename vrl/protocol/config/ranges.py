"""Which values a single key may have, beyond its type. `rules.check` applies it."""

from collections.abc import Callable, Iterator
from typing import Any

from vrl.protocol.config.schema import Config

_A, _R, _T = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "trainer"
_SANDBOX = f"{_R}.multi_turn.sandbox"
_SHARED_OPTIM = (f"{_A}.optim", "critic.optim")
_LORA = ("actor_rollout_ref.model", "critic.model")
_SHARED_FSDP = (
    *(f"{_A}.fsdp_config", "actor_rollout_ref.ref.fsdp_config"),
    *("critic.fsdp_config", "reward_model.fsdp_config"),
)
_POOLS = tuple(f"{section}.resource_pool" for section in ("actor_rollout_ref.ref", "critic", "reward_model"))

AT_LEAST_ONE = (
    "data.max_prompt_length",
    "data.max_response_length",
    "data.train_batch_size",
    "data.gen_batch_size",
    "data.filter_overlong_prompts_workers",
    f"{_A}.ppo_mini_batch_size",
    f"{_A}.ppo_micro_batch_size_per_gpu",
    f"{_A}.ppo_max_token_len_per_gpu",
    f"{_A}.ppo_epochs",
    f"{_A}.entropy_from_logits_chunk_size",
    f"{_A}.ulysses_sequence_parallel_size",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.model.min_pixels",
    "actor_rollout_ref.model.max_pixels",
    f"{_R}.n",
    f"{_R}.tensor_model_parallel_size",
    f"{_R}.max_model_len",
    f"{_R}.max_num_seqs",
    f"{_R}.max_num_batched_tokens",
    f"{_R}.log_prob_micro_batch_size_per_gpu",
    f"{_R}.log_prob_max_token_len_per_gpu",
    f"{_R}.checkpoint_engine.update_weights_bucket_megabytes",
    f"{_R}.val_kwargs.n",
    f"{_R}.agent.max_turns",
    f"{_R}.agent.single_response_max_tokens",
    f"{_R}.agent.concurrent_workers",
    f"{_R}.agent.max_image_pixels",
    f"{_R}.multi_turn.max_parallel_calls",
    f"{_R}.multi_turn.max_tool_response_length",
    *(f"{_SANDBOX}.{name}" for name in ("memory_mib", "processes", "file_mib", "output_chars", "image_pixels")),
    f"{_SANDBOX}.pool_size",
    "critic.ppo_mini_batch_size",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
    "critic.ppo_epochs",
    "critic.ulysses_sequence_parallel_size",
    *(f"{section}.lora_alpha" for section in _LORA),
    "reward_model.num_workers",
    "reward_model.max_resp_len",
    "reward_model.max_length",
    "reward_model.micro_batch_size_per_gpu",
    "reward_model.forward_max_token_len_per_gpu",
    "reward_model.ulysses_sequence_parallel_size",
    *(f"{pool}.{name}" for pool in _POOLS for name in ("n_gpus_per_node", "nnodes")),
    "algorithm.kl_ctrl.horizon",
    f"{_T}.n_gpus_per_node",
    f"{_T}.nnodes",
    f"{_T}.cpu_threads_per_rank",
    f"{_T}.total_epochs",
    f"{_T}.total_training_steps",
    f"{_T}.max_actor_ckpt_to_keep",
    f"{_T}.max_nonfinite_steps",
    f"{_T}.max_steps_without_samples",
    "warm_start.steps",
    "warm_start.batch_size",
    "ray_kwargs.ray_init.num_cpus",
)
NOT_NEGATIVE = (
    *(f"{section}.{name}" for section in _SHARED_OPTIM for name in ("lr", "weight_decay", "num_cycles")),
    *(f"{section}.lora_rank" for section in _LORA),
    f"{_A}.entropy_coeff",
    f"{_A}.kl_loss_coef",
    f"{_A}.policy_loss.clip_cov_lb",
    f"{_A}.policy_loss.ppo_kl_coef",
    f"{_A}.policy_loss.dpo_label_smoothing",
    f"{_R}.agent.max_retries",
    f"{_R}.agent.max_images",
    f"{_R}.limit_images",
    f"{_SANDBOX}.images",
    f"{_R}.seed",
    "data.seed",
    "algorithm.kl_ctrl.kl_coef",
    "algorithm.filter_groups.max_num_gen_batches",
    "algorithm.gigpo.step_advantage_w",
    "reward_model.overlong_buffer.len",
    "reward_model.overlong_buffer.penalty_factor",
    "reward_model.weight",
    "reward_model.rule_weight",
    f"{_T}.log_val_generations",
    f"{_T}.critic_warmup",
    f"{_T}.seed",
    "warm_start.lr",
    "warm_start.lr_warmup_steps",
    "prepare.seed",
)
ABOVE_ZERO = (
    f"{_A}.grad_clip",
    f"{_A}.clip_ratio",
    f"{_A}.clip_ratio_low",
    f"{_A}.clip_ratio_high",
    f"{_A}.loss_scale_factor",
    f"{_A}.policy_loss.clip_cov_ub",
    *(f"{_A}.policy_loss.{name}" for name in ("dro_beta", "tba_beta", "dpo_beta")),
    f"{_A}.tau_pos",
    f"{_A}.tau_neg",
    f"{_R}.kv_cache_gib",
    f"{_R}.agent.episode_timeout",
    f"{_SANDBOX}.cell_seconds",
    f"{_SANDBOX}.rate",
    "critic.grad_clip",
    "critic.cliprange_value",
    "reward_model.timeout",
    "reward_model.reward_clip",
    "algorithm.kl_ctrl.target_kl",
    f"{_T}.worker_start_timeout",
)
SHARES = (  # between 0 and 1, both allowed
    *(f"{section}.{name}" for section in _SHARED_OPTIM for name in ("lr_warmup_steps_ratio", "min_lr_ratio")),
    f"{_R}.agent.max_failed_ratio",
    f"{_A}.policy_loss.clip_cov_ratio",
    f"{_A}.policy_loss.kl_cov_ratio",
    "algorithm.gamma",
    "algorithm.lam",
    "algorithm.high_level_gamma",
    "warm_start.stop_probability",
)
MINUS_ONE_OR_MORE = (  # -1: off or all
    *(f"{section}.lr_warmup_steps" for section in _SHARED_OPTIM),
)
MINUS_ONE_OR_POSITIVE = (
    *(f"{section}.fsdp_size" for section in _SHARED_FSDP),
    "data.train_max_samples",
    "data.val_max_samples",
    f"{_R}.top_k",
    f"{_R}.val_kwargs.top_k",
    f"{_T}.test_freq",
    f"{_T}.save_freq",
)
NOT_EMPTY = ("data.prompt_key", "data.image_key", "data.reward_fn_key", "warm_start.messages_key", f"{_T}.project_name")

LIMITS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (AT_LEAST_ONE, lambda value: value >= 1, "1 or more is wanted"),
    (NOT_NEGATIVE, lambda value: value >= 0, "0 or more is wanted"),
    (ABOVE_ZERO, lambda value: value > 0, "more than 0 is wanted"),
    (SHARES, lambda value: 0 <= value <= 1, "a value from 0 to 1 is wanted"),
    (MINUS_ONE_OR_MORE, lambda value: value >= -1, "-1 (off), 0 or more is wanted"),
    (MINUS_ONE_OR_POSITIVE, lambda value: value == -1 or value >= 1, "-1 (off, all), 1 or more is wanted"),
    (NOT_EMPTY, lambda value: value != "", "a name is wanted"),
    (
        (f"{_R}.gpu_memory_utilization", f"{_R}.top_p", f"{_R}.val_kwargs.top_p"),
        lambda value: 0 < value <= 1,
        "a value above 0, at most 1 is wanted",
    ),
)


def value_of(config: Config, key: str) -> Any:
    """Return the value at a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def range_errors(config: Config) -> Iterator[str]:
    """Yield one message for every value outside its range; null is always in range. NaN never is."""
    for keys, fits, wanted in LIMITS:
        for key in keys:
            value = value_of(config, key)
            if value is not None and not fits(value):
                yield f"{key}={value}: {wanted}"
    for section in _SHARED_OPTIM:
        betas = value_of(config, f"{section}.betas")
        if not all(0 <= beta < 1 for beta in betas):
            yield f"{section}.betas={list(betas)}: values from 0 to below 1 are wanted"
