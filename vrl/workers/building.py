"""From settings to a sharded module with optimizer and packer: what actor, critic and reference share when built."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vrl.algorithms.schedules import constant_factor, cosine_factor
from vrl.models.images import ImageCache
from vrl.models.lora import LoraSettings
from vrl.models.renderer import HFRenderer
from vrl.models.ulysses import SequenceGroup
from vrl.protocol.config.learner import CriticModelConfig
from vrl.protocol.config.model import FsdpConfig, ModelConfig, OptimConfig
from vrl.protocol.config.schema import Config
from vrl.workers.learner import BatchLimits, Learner, OptimizerState, Residence
from vrl.workers.microbatch import Packer
from vrl.workers.process import fsdp_mesh, learner_ranks
from vrl.workers.sharding import Shardable, shard


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What every role of a process is built from."""

    config: Config
    device: torch.device
    renderer: HFRenderer
    images: ImageCache | None  # None for text models

    def dtype(self, wanted: str) -> torch.dtype:
        """Return the dtype of computation: bfloat16 on a GPU and float32 on a CPU unless the setting says otherwise."""
        if wanted != "auto":
            return getattr(torch, wanted)
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def packer(self, sequence: SequenceGroup | None = None, share_prompts: bool = False) -> Packer:
        """Return a packer for the model; vision-language models need positions and share one image cache."""
        return Packer(
            self.images,
            needs_positions=self.images is not None,
            sequence=sequence,
            share_prompts=share_prompts,
            image_token=self.renderer.image_token,
        )

    def limits(self, max_tokens: int, rows: int | None) -> BatchLimits:
        """Return a rank's micro-batch limits: by tokens with `use_dynamic_bsz` or no `rows`, else `rows` at a time."""
        if self.config.actor_rollout_ref.actor.use_dynamic_bsz or rows is None:
            return BatchLimits(max_tokens=max_tokens)
        return BatchLimits(rows=rows)


def lora_settings(model: ModelConfig | CriticModelConfig, section: str) -> LoraSettings:
    """Return how a model with `uses_lora` is adapted; `section` is where its settings stand."""
    return LoraSettings(
        section=section,
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        target_modules=model.target_modules,
        exclude_modules=model.exclude_modules,
        adapter_path=model.lora_adapter_path,
        vision_frozen=model.freeze_vision_tower,
    )


def sharded(module: nn.Module, blocks: Sequence[nn.Module], config: FsdpConfig, context: BuildContext) -> DeviceMesh:
    """Shard a module in place over the process group; return the mesh."""
    module.to(context.device)
    mesh = fsdp_mesh(context.device.type, config.fsdp_size)
    shard(module, blocks, mesh, context.dtype(config.dtype), config.reshard_after_forward)
    return mesh


def blocks_of(module: Shardable) -> list[nn.Module]:
    """Return the parts that are sharded one by one."""
    return [*module.vision_blocks(), *module.decoder_layers()]


def stepper(module: nn.Module, config: OptimConfig, grad_clip: float, total_steps: int) -> OptimizerState:
    """Return the optimizer of the trainable parameters with its schedule over `total_steps` optimizer steps."""
    optimizer = _optimizer([p for p in module.parameters() if p.requires_grad], config)
    return OptimizerState(optimizer=optimizer, schedule=schedule(config, total_steps), grad_clip=grad_clip)


def _optimizer(parameters: Sequence[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    settings = {"lr": config.lr, "betas": config.betas, "weight_decay": config.weight_decay}
    if config.optimizer == "DeepSpeedCPUAdam":
        from vrl.workers.cpu_adam import ShardedCPUAdam  # noqa: PLC0415  (DeepSpeed is optional)

        return ShardedCPUAdam(parameters, **settings)
    # On a CPU the fused kernel goes through memory once, and `foreach` once an operation. On a GPU it would keep the
    # counters of steps there.
    on_host = all(parameter.device.type == "cpu" for parameter in parameters)
    return torch.optim.AdamW(parameters, **settings, fused=on_host, foreach=not on_host)


def schedule(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Return the learning-rate factor by optimizer steps taken."""
    warmup = config.lr_warmup_steps
    if warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * total_steps)
    if config.lr_scheduler_type == "constant":
        return partial(constant_factor, warmup_steps=warmup)
    return partial(
        cosine_factor,
        warmup_steps=warmup,
        total_steps=total_steps,
        min_lr_ratio=config.min_lr_ratio,
        num_cycles=config.num_cycles,
    )


def learner(
    module: nn.Module,
    context: BuildContext,
    limits: BatchLimits,
    step: OptimizerState | None,
    residence: Residence,
    sequence_parallel_size: int = 1,
    share_prompts: bool = False,
) -> Learner:
    """Return the learner of a sharded module; `step` is None for a frozen one.

    `limits` are of a rank: ranks that share rows have room for so many times the tokens.
    """
    ranks = learner_ranks(context.device.type, sequence_parallel_size)
    packer = context.packer(ranks.sequence, share_prompts)
    return Learner(module, packer, together(limits, sequence_parallel_size), step, ranks.data, residence)


def together(limits: BatchLimits, sequence_parallel_size: int) -> BatchLimits:
    """Return what ranks that share rows have room for, from the limits of one of them."""
    return replace(limits, max_tokens=limits.max_tokens * sequence_parallel_size)


def residence(config: FsdpConfig, optim: OptimConfig | None = None, activations: bool = False) -> Residence:
    """Return what of a role waits in host memory. CPU Adam's state never leaves it; a frozen role has no `optim`."""
    moves = config.optimizer_offload and optim is not None and optim.optimizer == "AdamW"
    return Residence(parameters=config.param_offload, optimizer=moves, activations=activations)
