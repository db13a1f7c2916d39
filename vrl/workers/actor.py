"""The actor and the reference: log-probs of rows, and the actor's update. One instance a rank; all ranks call alike."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Self, final

import torch
from torch import Tensor, nn

from vrl.algorithms.losses import registry as policy_losses
from vrl.models import liger, lora
from vrl.models.loading import load_policy
from vrl.models.packing import PackedBatch
from vrl.models.policy import CausalPolicy
from vrl.models.renderer import HFRenderer
from vrl.models.saving import save_hf_folder
from vrl.models.token_log_probs import Extra
from vrl.protocol.columns import ENTROPY, INPUT_IDS, LOSS_MASK, OLD_LOG_PROBS, REF_LOG_PROBS, SUM_PI_SQUARED
from vrl.protocol.config.model import FsdpConfig
from vrl.protocol.config.schema import Config
from vrl.protocol.dataproto import DataProto
from vrl.protocol.dispatch import Dispatch, register
from vrl.workers import checkpoint
from vrl.workers.building import (
    BuildContext,
    blocks_of,
    learner,
    lora_settings,
    residence,
    sharded,
    stepper,
    together,
)
from vrl.workers.learner import BatchLimits, Learner, timed, under_role
from vrl.workers.losses import (
    REQUIRED_BY_POLICY,
    PolicyObjective,
    SamplingDistribution,
    SupervisedObjective,
    loss_params,
)
from vrl.workers.sharding import full_parameters

_EXTRAS = {ENTROPY: Extra.ENTROPY, SUM_PI_SQUARED: Extra.SUM_PI_SQUARED}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceLimits:
    """How the actor's passes without an update are cut into micro-batches: of old log-probs and of its reference."""

    log_probs: BatchLimits
    base: BatchLimits

    @classmethod
    def of(cls, context: BuildContext) -> Self:
        """Return the settings' limits, of all ranks that share rows together."""
        config = context.config
        size = config.sequence_parallel_size("actor")
        return cls(
            log_probs=together(context.limits(config.log_prob_token_budget, config.log_prob_rows), size),
            base=together(context.limits(config.ref_token_budget, config.ref_rows), size),
        )


@final
class ActorWorker:
    """Holds the policy, its optimizer and the policy's objective."""

    def __init__(
        self,
        policy: CausalPolicy,
        learn: Learner,
        objective: PolicyObjective,
        renderer: HFRenderer,
        bucket_bytes: int,
        limits: InferenceLimits,
        extras: Sequence[str] = (ENTROPY,),
    ) -> None:
        self._policy = policy
        self._learner = learn
        self._renderer = renderer
        self._objective = objective
        self._bucket_bytes = bucket_bytes
        self._limits = limits
        self._extras = tuple(extras)  # what `log_probs` returns beside them

    @classmethod
    def build(cls, context: BuildContext, total_steps: int) -> Self:
        """Load, shard and give an optimizer. `total_steps` counts optimizer steps of the whole run."""
        config = context.config
        actor = config.actor_rollout_ref.actor
        policy = _load(context, actor.fsdp_config, frozen=False)
        limits = context.limits(actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu)
        step = stepper(policy, actor.optim, actor.grad_clip, total_steps)
        bucket = config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20
        stays = residence(actor.fsdp_config, actor.optim, config.actor_rollout_ref.model.enable_activation_offload)
        ways = (config.sequence_parallel_size("actor"), config.shares_prompts("actor"))
        learn = learner(policy, context, limits, step, stays, *ways)
        extras = (ENTROPY, SUM_PI_SQUARED) if config.needs_sum_pi_squared else (ENTROPY,)
        inference = InferenceLimits.of(context)
        return cls(policy, learn, policy_objective(context), context.renderer, bucket, inference, extras)

    @register(Dispatch.ROWS, requires=(INPUT_IDS, LOSS_MASK), returns=(OLD_LOG_PROBS, ENTROPY))
    def log_probs(self, batch: DataProto) -> DataProto:
        """Return the log-probs and the entropy of sampled tokens under the present weights.

        And the sum of squared probabilities, where the run's estimator needs it.
        """
        names = (OLD_LOG_PROBS, *self._extras)
        return _log_probs(self._learner, self._objective.sampling, batch, names, "old_log_prob", self._limits.log_probs)

    @register(Dispatch.ROWS, requires=(INPUT_IDS, LOSS_MASK), returns=(REF_LOG_PROBS,))
    def base_log_probs(self, batch: DataProto) -> DataProto:
        """Return the log-probs of sampled tokens without the adapter: with LoRA the reference is in these weights."""
        with lora.adapters_off(self._policy):
            return _log_probs(
                self._learner, self._objective.sampling, batch, (REF_LOG_PROBS,), "ref", self._limits.base
            )

    @register(Dispatch.MINI_BATCHES, requires=REQUIRED_BY_POLICY)
    def update(self, batch: DataProto, steps: Sequence[Sequence[int]]) -> dict[str, float]:
        """Take one optimizer step a mini-batch; return metrics."""
        return under_role(self._learner.update(batch, steps, self._objective), "actor")

    @register(Dispatch.MINI_BATCHES, requires=(INPUT_IDS, LOSS_MASK))
    def update_supervised(self, batch: DataProto, steps: Sequence[Sequence[int]]) -> dict[str, float]:
        """Take one optimizer step a mini-batch on the cross-entropy of the masked tokens."""
        objective = SupervisedObjective(sampling=self._objective.sampling)
        return under_role(self._learner.update(batch, steps, objective), "train")

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full parameters by Hugging Face name, an adapter merged into them; all ranks must exhaust it together.

        With LoRA and without it, names, number and shapes are the same.
        """
        with self._learner.offload.loaded():
            yield from lora.merged(self._policy.hf, self._policy.hf_named_parameters(), self._gathered)

    def _gathered(self, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
        return full_parameters(named, self._bucket_bytes)

    @register(Dispatch.ALL)
    def save(self, folder: Path) -> None:
        """Write weights, optimizer and counters; the folder must not exist yet."""
        checkpoint.save(folder, self._learner)

    @register(Dispatch.ALL)
    def load(self, folder: Path) -> str:
        """Read what `save` wrote; see `checkpoint.load`. Raises DataError when the checkpoint does not fit."""
        return checkpoint.load(folder, self._learner)

    @register(Dispatch.ALL)
    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder (weights, config, tokenizer, processor).

        With LoRA its weights are the merged ones, and the adapter alone is beside them in peft's format.
        """
        write = checkpoint.is_writer()
        save_hf_folder(self._policy, self.full_weights(), self._renderer, folder, write=write)
        if lora.has_adapters(self._policy):
            adapter = self._gathered(lora.adapter_parameters(self._policy.hf))
            lora.save_adapter(self._policy.hf, adapter, folder / lora.FOLDER, write=write)


@final
class ReferenceWorker:
    """The frozen policy that the KL is measured against."""

    def __init__(self, learn: Learner, sampling: SamplingDistribution) -> None:
        self._learner = learn
        self._sampling = sampling

    @classmethod
    def build(cls, context: BuildContext) -> Self:
        """Load and shard the policy of `actor_rollout_ref.model`, without gradients."""
        config = context.config
        fsdp = config.actor_rollout_ref.ref.fsdp_config
        policy = _load(context, fsdp, frozen=True)
        limits = context.limits(config.ref_token_budget, config.ref_rows)
        stays = residence(fsdp)
        ways = (config.sequence_parallel_size("reference"), config.shares_prompts("reference"))
        learn = learner(policy, context, limits, None, stays, *ways)
        return cls(learn, sampling_distribution(context))

    @register(Dispatch.ROWS, requires=(INPUT_IDS, LOSS_MASK), returns=(REF_LOG_PROBS,))
    def log_probs(self, batch: DataProto) -> DataProto:
        """Return the log-probs of sampled tokens under the reference."""
        return _log_probs(self._learner, self._sampling, batch, (REF_LOG_PROBS,), "ref")


def sampling_distribution(context: BuildContext) -> SamplingDistribution:
    """Return what the engine samples from: the learner's log-probs are those of the same distribution."""
    policy = context.config.actor_rollout_ref
    return SamplingDistribution(
        temperature=policy.rollout.temperature,
        banned_ids=tuple(context.renderer.banned_ids),
        chunk_tokens=policy.actor.entropy_from_logits_chunk_size,
    )


def policy_objective(context: BuildContext) -> PolicyObjective:
    """Return the actor's objective from the settings."""
    config: Config = context.config
    actor = config.actor_rollout_ref.actor
    return PolicyObjective(
        loss=policy_losses.get_policy_loss(actor.policy_loss.loss_mode),
        params=loss_params(actor),
        sampling=sampling_distribution(context),
        mode=actor.loss_agg_mode,
        norm_length=actor.loss_scale_factor or float(config.data.max_response_length),
        entropy_coeff=actor.entropy_coeff,
        kl_coef=actor.kl_loss_coef if actor.use_kl_loss else None,
        kl_type=actor.kl_loss_type,
    )


def _load(context: BuildContext, fsdp: FsdpConfig, frozen: bool) -> CausalPolicy:
    model = context.config.actor_rollout_ref.model
    policy = load_policy(
        model.path,
        torch.float32,  # master weights
        gradient_checkpointing=model.enable_gradient_checkpointing and not frozen,
        freeze_vision_tower=model.freeze_vision_tower,
        override_config=model.override_config,
        trust_remote_code=model.trust_remote_code,
    )
    if model.use_liger:
        liger.apply(policy.hf)
    if frozen:
        policy.requires_grad_(False)
    elif model.uses_lora:
        lora.add_adapters(policy.hf, lora_settings(model, "actor_rollout_ref.model"), model.path)
    sharded(policy, blocks_of(policy), fsdp, context)
    return policy


def _log_probs(
    learn: Learner,
    sampling: SamplingDistribution,
    batch: DataProto,
    names: tuple[str, ...],
    call: str,
    limits: BatchLimits | None = None,
) -> DataProto:
    want = reduce(or_, (_EXTRAS[name] for name in names[1:]), Extra.NONE)

    def run(module: nn.Module, packed: PackedBatch, rows: DataProto) -> Sequence[Tensor]:
        outputs = module(
            packed,
            temperature=sampling.temperature,
            banned_ids=sampling.banned_ids,
            want=want,
            chunk_tokens=sampling.chunk_tokens,
            positions=rows.ragged(LOSS_MASK).values.to(packed.input_ids.device),
        )
        return [x for x in (outputs.log_probs, outputs.entropy, outputs.sum_pi_squared) if x is not None]

    # No column on a rank without rows, which still ran the collectives.
    columns, seconds = learn.infer(batch, run, limits)
    return DataProto(dict(zip(names, columns, strict=True)) if columns else {}, meta=timed(call, seconds))
