"""Runs what a sub-command asked for, once its settings are read: everything that needs torch and Ray starts here."""

import ray

from vrl.controller.corrections import correction_params
from vrl.controller.environments import checked_environments
from vrl.controller.pools import pool_specs
from vrl.controller.prepare import prepare
from vrl.controller.run import assembled
from vrl.controller.run_folder import RunFolder
from vrl.controller.warm_start import warm_started
from vrl.controller.worker_group import start_ray
from vrl.models.liger import check_type
from vrl.models.loading import HeadCounts, head_counts, read_config, read_reward_config, skeleton
from vrl.models.lora import adapted_names
from vrl.models.renderer import check_same_tokenizer, load_renderer
from vrl.protocol.config.learner import CriticModelConfig
from vrl.protocol.config.model import ModelConfig
from vrl.protocol.config.rules import check, check_heads
from vrl.protocol.config.schema import Config
from vrl.protocol.errors import ConfigError
from vrl.workers.building import lora_settings


def launch(config: Config, folder: RunFolder, gpus: bool) -> None:
    """Train, or evaluate only, to the end. Raises before anything is started where the run could not work."""
    check(config)
    correction_params(config.algorithm.rollout_correction)
    prepare(config)
    check_model(config)
    with assembled(config, folder, gpus) as trainer:
        if config.trainer.val_only:
            trainer.evaluate()
        else:
            trainer.fit()


def fine_tune(config: Config, gpus: bool) -> str:
    """Do the supervised steps alone; return the model folder."""
    check(config)
    prepare(config)
    start_ray(config, gpus)
    try:
        spec = pool_specs(config, gpus)[0]
        model = config.actor_rollout_ref.model
        renderer = load_renderer(config.tokenizer_path, model.min_pixels, model.max_pixels)
        config, tools = checked_environments(config, renderer)
        return warm_started(config, spec, tools.left_out, through_adapter=True).actor_rollout_ref.model.path
    finally:
        ray.shutdown()


def check_model(config: Config) -> None:
    """Refuse what the model does not fit, once its folder is there: parallel sizes, layers for LoRA and Liger."""
    policy = config.actor_rollout_ref
    heads = head_counts(policy.model.path, trust_remote_code=policy.model.trust_remote_code)
    _check_tower(policy.model, "actor_rollout_ref.model", policy.model.path, heads)
    if config.needs_critic:
        _check_critic(config, heads)
    sizes = {
        "actor_rollout_ref.rollout.tensor_model_parallel_size": policy.rollout.tensor_model_parallel_size,
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": policy.actor.ulysses_sequence_parallel_size,
    }
    for key, size in sizes.items():
        check_heads(heads.query, heads.key_value, size, key)
    _check_layers(policy.model, "actor_rollout_ref.model", policy.model.path)
    if config.needs_critic:
        _check_layers(config.critic.model, "critic.model", config.critic_model_path)
    if config.reward_model.enable:
        check_reward_model(config)


def _check_critic(config: Config, policy: HeadCounts) -> None:
    """Refuse a backbone that does not read the rows as the policy wrote them: by heads, tokenizer and images."""
    model, path = config.critic.model, config.critic_model_path
    critic = head_counts(path, trust_remote_code=model.trust_remote_code)
    key = "critic.ulysses_sequence_parallel_size"
    check_heads(critic.query, critic.key_value, config.critic.ulysses_sequence_parallel_size, key)
    _check_tower(model, "critic.model", path, critic)
    if model.path is None:
        return
    if (critic.vision is None) != (policy.vision is None):
        has = (
            "no vision tower, and the policy has one"
            if critic.vision is None
            else "a vision tower, and the policy none"
        )
        raise ConfigError(
            f"critic.model.path={path} has {has}: give a backbone of the policy's kind, or null for the policy's own"
        )
    way_out = "give a backbone with the policy's tokenizer, or null for the policy's own"
    check_same_tokenizer(
        config.tokenizer_path, path, "critic.model.path", way_out, trust_remote_code=model.trust_remote_code
    )


def _check_tower(model: ModelConfig | CriticModelConfig, section: str, path: str, heads: HeadCounts) -> None:
    if model.freeze_vision_tower and heads.vision is None:
        raise ConfigError(
            f"{section}.freeze_vision_tower=True, but {path} has no vision tower: set it to False or give a "
            "vision-language model"
        )


def check_reward_model(config: Config) -> None:
    """Refuse a folder that is no reward model, and a tokenizer that does not fit the rows' ids."""
    reward = config.reward_model
    assert reward.model.path is not None, "the rules ask for it"
    path, trust = reward.model.path, reward.model.trust_remote_code
    found = read_reward_config(path, trust_remote_code=trust)
    heads = head_counts(path, trust_remote_code=trust)
    key = "reward_model.ulysses_sequence_parallel_size"
    check_heads(heads.query, heads.key_value, reward.ulysses_sequence_parallel_size, key)
    if reward.max_length is not None and found.positions is not None and reward.max_length > found.positions:
        raise ConfigError(
            f"reward_model.max_length={reward.max_length}, but {path} has {found.positions} positions: set "
            f"max_length={found.positions} or null"
        )
    if reward.model.input_tokenizer is not None:
        load_renderer(path, trust_remote_code=trust)
    else:
        way_out = f"set reward_model.model.input_tokenizer={config.tokenizer_path}, and rows are rendered anew"
        check_same_tokenizer(config.tokenizer_path, path, "reward_model.model.path", way_out, trust_remote_code=trust)


def _check_layers(model: ModelConfig | CriticModelConfig, section: str, path: str) -> None:
    if model.use_liger:
        check_type(read_config(path, trust_remote_code=model.trust_remote_code).model_type, f"{section}.use_liger")
    if model.lora_rank == 0 or model.lora_adapter_path is not None:  # an adapter's folder names its layers itself
        return
    hf = skeleton(
        path,
        value_model=isinstance(model, CriticModelConfig),
        override_config=model.override_config,
        trust_remote_code=model.trust_remote_code,
    )
    adapted_names(hf, lora_settings(model, section))
