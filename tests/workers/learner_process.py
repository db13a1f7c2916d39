"""One rank of test_learner.py: runs each way from fresh weights and writes what rank 0 found."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.workers.invariance import Way
from tests.workers.padded import PaddedPolicy, PaddedValue
from tests.workers.rig import config_of, context_of, png, prompt, prompts_of
from vrl.algorithms.losses.registry import LossParams, get_policy_loss
from vrl.models import lora
from vrl.models.loading import load_policy, load_value_model
from vrl.models.lora import LoraSettings
from vrl.models.policy import CausalPolicy
from vrl.models.token_log_probs import Extra
from vrl.protocol.columns import (
    ADVANTAGES,
    IMAGE_KEYS,
    INPUT_IDS,
    LOSS_MASK,
    OLD_LOG_PROBS,
    POSITION_IDS,
    REF_LOG_PROBS,
    RETURNS,
    ROLLOUT_LOG_PROBS,
    TURN_IDS,
    VALUES,
)
from vrl.protocol.config.model import FsdpConfig
from vrl.protocol.dataproto import DataProto, object_column
from vrl.protocol.ragged import Ragged
from vrl.protocol.trajectory import content_key
from vrl.workers import process
from vrl.workers.building import BuildContext, blocks_of, learner, sharded, stepper
from vrl.workers.learner import BatchLimits, Learner, Residence
from vrl.workers.losses import PolicyObjective, SamplingDistribution, ValueObjective
from vrl.workers.offload import Offload
from vrl.workers.process import RankPlace

COPIES = 3


def rows_of(context: BuildContext, kind: str) -> DataProto:
    """Return rows with 0, 1, 2 and 3 images, random answers, advantages and old log-probs."""
    draw = torch.Generator().manual_seed(3)
    ids, masks, positions, keys, blobs = [], [], [], [], {}
    prompts = prompts_of(kind)
    if kind != "qwen2":
        prompts.append(prompt("three", "<image><image> or <image>", [png(60, 90, 4), png(30, 120, 5), png(56, 56, 6)]))
    for given in prompts * COPIES:
        before = context.renderer.expand(context.renderer.render(given.messages), given.images)
        answer = torch.randint(30, 200, (int(torch.randint(2, 9, (1,), generator=draw)),), generator=draw).tolist()
        ids.append(before + answer)
        masks.append([0] * len(before) + [1] * len(answer))
        positions.append(context.renderer.positions(ids[-1], given.images))
        keys.append(tuple(content_key(image) for image in given.images))
        blobs |= {content_key(image): image for image in given.images}
    column = Ragged.from_rows(ids, torch.int64)
    total = len(column.values)

    def noise(scale: float) -> Ragged:
        return Ragged(torch.randn(total, generator=draw) * scale, column.offsets)

    columns: dict[str, Any] = {
        INPUT_IDS: column,
        LOSS_MASK: Ragged.from_rows(masks, torch.bool),
        ADVANTAGES: noise(1.0),
        OLD_LOG_PROBS: Ragged(noise(0.1).values - 4.0, column.offsets),
        REF_LOG_PROBS: Ragged(noise(0.1).values - 4.0, column.offsets),
        ROLLOUT_LOG_PROBS: noise(0.1),
        VALUES: noise(0.1),
        RETURNS: noise(1.0),
        TURN_IDS: Ragged.from_rows([[k - 1 for k in mask] for mask in masks], torch.int32),
    }
    if positions[0] is not None:
        columns[POSITION_IDS] = Ragged(torch.cat([torch.as_tensor(p) for p in positions]), column.offsets)
    return DataProto(columns, {IMAGE_KEYS: object_column(keys)}, blobs)


def learner_of(context: BuildContext, load: Callable[..., Any], way: Way) -> Learner:
    actor = context.config.actor_rollout_ref.actor
    path = context.config.actor_rollout_ref.model.path
    model = load(path, torch.float32, gradient_checkpointing=way.checkpointing)
    if way.adapter:
        model = adapted(model, path, load, merged=way.adapter == "merged")
    if way.padded:
        model = PaddedPolicy(model) if load is load_policy else PaddedValue(model)
    else:
        sharded(model, blocks_of(model), FsdpConfig(fsdp_size=way.fsdp_size, dtype=way.dtype), context)
    limits = BatchLimits(max_tokens=way.max_tokens, rows=way.rows)
    step = stepper(model, actor.optim, 1.0, 10)
    learn = learner(model, context, limits, step, Residence(activations=way.offload), way.shared_by, way.share_prompts)
    if way.offload:  # from one memory to the same one, but through all that a GPU's would go through
        learn.offload = Offload(model, step.optimizer, context.device, parameters=True, state=True)
    return learn


def adapted(model: Any, path: str, load: Callable[..., Any], merged: bool) -> Any:
    """Return the model with an adapter that changes it, beside its weights or merged into those of a plain one."""
    hf = model.hf if isinstance(model, CausalPolicy) else model.backbone
    lora.add_adapters(hf, LoraSettings(section="model", rank=4, alpha=8), path)
    draw = torch.Generator().manual_seed(9)
    for name, parameter in lora.adapter_parameters(hf):
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.02, generator=draw)
    if not merged:
        return model
    plain = load(path, torch.float32)
    inner = plain.hf if isinstance(plain, CausalPolicy) else plain.backbone
    weights = dict(lora.merged(hf, list(hf.named_parameters()), lambda named: ((n, p.detach()) for n, p in named)))
    inner.load_state_dict(weights, strict=False)
    return plain


def objective_of(context: BuildContext, mode: str = "token-mean") -> PolicyObjective:
    return PolicyObjective(
        loss=get_policy_loss("vanilla"),
        params=LossParams(),
        sampling=SamplingDistribution(temperature=0.8, banned_ids=context.renderer.banned_ids, chunk_tokens=7),
        mode=mode,
        norm_length=None,
        entropy_coeff=0.01,
        kl_coef=0.1,
        kl_type="low_var_kl",
    )


def weights(learner: Learner) -> torch.Tensor:
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in learner.module.parameters()]
    return torch.cat([part.detach().reshape(-1) for part in parts]).clone()


def per_token(columns: list[Ragged], names: tuple[str, ...], shared_by: int) -> dict[str, list[float]]:
    """Return each column of all rows, in the order of rows."""
    mine = [column.values.tolist() for column in columns] or [[] for _ in names]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    parts = everyone[::shared_by]  # neighbouring ranks that share sequences hold the same rows
    return {name: [value for part in parts for value in part[k]] for k, name in enumerate(names)}


def measure_critic(context: BuildContext, mine: DataProto, members: list[int], way: Way) -> dict[str, Any]:
    learner = learner_of(context, load_value_model, way)
    columns, _ = learner.infer(mine, lambda module, packed, rows: [module(packed)])
    objective = ValueObjective(cliprange_value=0.5, mode=way.mode, norm_length=None)
    metrics = learner.update(mine, [members], objective)
    found = {"critic/vf_loss": metrics["critic/vf_loss"], "critic/grad_norm": metrics["grad_norm"]}
    return found | per_token(columns, ("values",), way.shared_by)


def share_of(rows: int, place: int, parts: int, way: Way) -> slice:
    """Return the rows of a part; the first two differ in size where the way says so."""
    if way.first_rank is None or parts == 1:
        return slice(rows * place // parts, rows * (place + 1) // parts)
    return slice(0, way.first_rank) if place == 0 else slice(way.first_rank, rows)


def measure(context: BuildContext, batch: DataProto, way: Way) -> dict[str, Any]:
    # Two parts at most: neighbouring ranks that share sequences hold the same one.
    place, parts = dist.get_rank() // way.shared_by, dist.get_world_size() // way.shared_by
    learner = learner_of(context, load_policy, way)
    batch = batch.rows(slice(way.first_rows))
    mine = batch.rows(share_of(len(batch), place, parts, way))
    objective = objective_of(context, way.mode)

    def run(module, packed, rows):
        outputs = module(packed, positions=rows.ragged(LOSS_MASK).values, want=Extra.ENTROPY)
        return [outputs.log_probs, outputs.entropy]

    columns = per_token(learner.infer(mine, run)[0], ("log_probs", "entropy"), way.shared_by)
    columns |= measure_critic(context, mine, list(range(len(mine))), way)
    before = weights(learner)
    metrics = learner.update(mine, [list(range(len(mine)))], objective)
    after = weights(learner)
    poisoned = mine
    if len(mine):
        bad = mine.ragged(ADVANTAGES).values.clone()
        bad[mine.ragged(LOSS_MASK).values.nonzero()[0]] = float("nan")
        poisoned = mine.with_columns(**{ADVANTAGES: Ragged(bad, mine.ragged(ADVANTAGES).offsets)})
    learner.update(poisoned, [list(range(len(mine)))], objective)
    skipped = weights(learner)
    learner.update(mine, [list(range(len(mine)))], objective)
    return {name: value for name, value in metrics.items() if not name.startswith("timing")} | {
        "actor/grad_norm": metrics["grad_norm"],
        "moved": float((after - before).norm()),
        "skipped": float(learner.skipped_steps),
        "moved_by_skipped": float((skipped - after).abs().max()),
        "moved_after_skipped": float((weights(learner) - skipped).abs().max()),
        **columns,
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    process.start(
        RankPlace(
            rank=rank,
            world_size=world,
            local_rank=rank,
            local_world_size=world,
            master_address="127.0.0.1",
            master_port=int(os.environ["MASTER_PORT"]),
            device="cpu",
        )
    )
    found = {}
    for kind, folder in given["folders"].items():
        context = context_of(config_of(Path(folder), world))
        batch = rows_of(context, kind)
        found[kind] = [measure(context, batch, Way(**way)) for way in given["ways"]]
    if rank == 0:
        Path(given["out"]).write_text(json.dumps(found))
    process.stop()


if __name__ == "__main__":
    main()
