"""The critic: values of prefixes, and its update. One instance a rank; all ranks call alike."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self, final

import torch
from torch import Tensor, nn

from vrl.models import liger, lora
from vrl.models.loading import load_value_model
from vrl.models.packing import PackedBatch
from vrl.models.value import ValueModel
from vrl.protocol.columns import INPUT_IDS, LOSS_MASK, VALUES
from vrl.protocol.dataproto import DataProto
from vrl.protocol.dispatch import Dispatch, register
from vrl.workers import checkpoint
from vrl.workers.building import BuildContext, blocks_of, learner, lora_settings, residence, sharded, stepper
from vrl.workers.learner import Learner, timed, under_role
from vrl.workers.losses import REQUIRED_BY_VALUE, ValueObjective
from vrl.workers.sharding import full_parameters


@final
class CriticWorker:
    """Holds the value model and its optimizer."""

    def __init__(self, model: ValueModel, learn: Learner, objective: ValueObjective, bucket_bytes: int) -> None:
        self._model = model
        self._learner = learn
        self._objective = objective
        self._bucket_bytes = bucket_bytes

    @classmethod
    def build(cls, context: BuildContext, total_steps: int) -> Self:
        """Load, shard and give an optimizer. `total_steps` counts optimizer steps of the whole run."""
        config = context.config
        critic = config.critic
        module = load_value_model(
            config.critic_model_path,
            torch.float32,  # master weights
            gradient_checkpointing=critic.model.enable_gradient_checkpointing,
            freeze_vision_tower=critic.model.freeze_vision_tower,
            override_config=critic.model.override_config,
            trust_remote_code=critic.model.trust_remote_code,
        )
        if critic.model.use_liger:
            liger.apply(module.backbone)
        if critic.model.uses_lora:  # the value head, which is new as a rule, learns beside the adapters
            lora.add_adapters(module.backbone, lora_settings(critic.model, "critic.model"), config.critic_model_path)
        sharded(module, blocks_of(module), critic.fsdp_config, context)
        limits = context.limits(config.critic_token_budget, config.critic_rows)
        step = stepper(module, critic.optim, critic.grad_clip, total_steps)
        objective = ValueObjective(
            cliprange_value=critic.cliprange_value,
            mode=critic.loss_agg_mode,
            norm_length=float(config.data.max_response_length),
        )
        stays = residence(critic.fsdp_config, critic.optim, critic.model.enable_activation_offload)
        ways = (config.sequence_parallel_size("critic"), config.shares_prompts("critic"))
        learn = learner(module, context, limits, step, stays, *ways)
        megabytes = config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes
        return cls(module, learn, objective, megabytes * 2**20)

    @register(Dispatch.ROWS, requires=(INPUT_IDS, LOSS_MASK), returns=(VALUES,))
    def values(self, batch: DataProto) -> DataProto:
        """Return the value of the prefix before each token."""
        columns, seconds = self._learner.infer(batch, _run)
        return DataProto({VALUES: columns[0]} if columns else {}, meta=timed("values", seconds))

    @register(Dispatch.MINI_BATCHES, requires=REQUIRED_BY_VALUE)
    def update(self, batch: DataProto, steps: Sequence[Sequence[int]]) -> dict[str, float]:
        """Take one optimizer step a mini-batch; return metrics."""
        return under_role(self._learner.update(batch, steps, self._objective), "critic")

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
        """Write a folder that loads as `critic.model.path`: a Hugging Face one of the backbone, the value head beside.

        With LoRA its weights are the merged ones, and the adapter alone is beside them in peft's format.
        """
        write, backbone = checkpoint.is_writer(), self._model.backbone
        with self._learner.offload.loaded():
            weights = lora.merged(backbone, self._model.hf_named_parameters(), self._gathered)
            full = {name: tensor.to("cpu", copy=True) for name, tensor in weights if write}
            if write:
                self._model.save_pretrained(folder, full)
            if lora.has_adapters(backbone):
                adapter = self._gathered(lora.adapter_parameters(backbone))
                lora.save_adapter(backbone, adapter, folder / lora.FOLDER, write=write)

    def _gathered(self, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
        return full_parameters(named, self._bucket_bytes)


def _run(module: nn.Module, packed: PackedBatch, _rows: DataProto) -> Sequence[Tensor]:
    return [module(packed)]
