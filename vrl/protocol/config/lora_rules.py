"""Rules across the keys of LoRA; `rules` runs them with the others. What needs the model is checked with it."""

import re
from collections.abc import Iterator
from dataclasses import replace

from vrl.protocol.config.learner import CriticModelConfig, RefConfig
from vrl.protocol.config.model import ModelConfig
from vrl.protocol.config.schema import Config

_MODEL, _CRITIC = "actor_rollout_ref.model", "critic.model"

Messages = Iterator[str]


def modules(config: Config) -> Messages:
    """Which layers are adapted."""
    for section, model in _sections(config):
        for name, given in (("target_modules", model.target_modules), ("exclude_modules", model.exclude_modules)):
            if isinstance(given, str) and not _is_pattern(given):
                yield f"{section}.{name}={given!r} is no regular expression: give names, {name}=[q_proj,v_proj]"
        if not model.target_modules:
            yield f"{section}.target_modules is empty: give names, [q_proj,v_proj], all-linear, or lora_rank=0"


def adapter(config: Config) -> Messages:
    """An adapter to go on from."""
    for section, model in _sections(config):
        if model.lora_adapter_path == "":
            yield f"{section}.lora_adapter_path is empty: give a folder, or null for new adapters"
    warm = config.warm_start.enable
    started = {_MODEL: warm, _CRITIC: warm and config.critic.model.path is None}
    for section, model in _sections(config):
        if started[section] and model.lora_adapter_path:
            yield (
                f"{section}.lora_adapter_path={model.lora_adapter_path} belongs to the model before the warm start, "
                "which changes all its weights: set warm_start.enable=False or lora_adapter_path=null"
            )


def unused(config: Config) -> Messages:
    """Settings without effect."""
    default = ModelConfig()
    for section, model in _sections(config):
        shape = {
            "lora_alpha": model.lora_alpha != default.lora_alpha,
            "target_modules": model.target_modules != default.target_modules,
            "exclude_modules": model.exclude_modules != default.exclude_modules,
        }
        changed = ", ".join(name for name, is_changed in shape.items() if is_changed)
        if changed and not model.uses_lora:
            yield f"{section}: {changed} without effect, LoRA is off (lora_rank=0)"
        if changed and model.lora_adapter_path:
            yield f"{section}: {changed} without effect, those of the adapter in lora_adapter_path hold"


def reference(config: Config) -> Messages:
    """A reference that is the actor without its adapter."""
    if not config.reference_is_base:
        return
    policy = config.actor_rollout_ref
    ref = replace(policy.ref, log_prob_micro_batch_size_per_gpu=None, log_prob_max_token_len_per_gpu=None)
    if ref != RefConfig():
        yield (
            "actor_rollout_ref.ref: without effect but for log_prob_*, with LoRA the reference is the actor's model "
            "without its adapter and runs with the actor's settings"
        )
    if policy.model.lora_adapter_path:
        yield (
            f"{_MODEL}.lora_adapter_path={policy.model.lora_adapter_path}: the KL is measured to the model without "
            "this adapter, so it does not start at zero"
        )


def _sections(config: Config) -> tuple[tuple[str, ModelConfig | CriticModelConfig], ...]:
    return (_MODEL, config.actor_rollout_ref.model), (_CRITIC, config.critic.model)


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True
