"""One rank of test_lora.py: trains actor and critic through adapters, saves and loads; rank 0 writes what it saw.

`python -m tests.workers.lora_process RANK WORLD PORT ROOT`: the models are ROOT/KIND, checkpoints and exports go below
ROOT, and a world of one also reads the checkpoints of a world of two.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file, save_file

from tests.workers.learner_process import COPIES, rows_of
from tests.workers.rig import config_of, context_of, place_of
from vrl.models import lora
from vrl.models.loading import load_policy, load_value_model
from vrl.models.lora import FOLDER, LoraSettings
from vrl.models.policy import CausalPolicy
from vrl.protocol.columns import IMAGE_KEYS, LOSS_MASK, OLD_LOG_PROBS, REF_LOG_PROBS, VALUES
from vrl.protocol.config.builder import fill
from vrl.protocol.dataproto import DataProto
from vrl.protocol.errors import DataError
from vrl.workers import process
from vrl.workers.actor import ActorWorker
from vrl.workers.building import BuildContext
from vrl.workers.critic import CriticWorker

KINDS = ("qwen2", "qwen2_5_vl")
RANK_OF_ADAPTERS = 4
STEPS = 4


def lora_context(folder: Path, world: int, rank: int = RANK_OF_ADAPTERS) -> BuildContext:
    """Adapters in the decoder, and in the tower of a model that has one; gradient checkpointing on."""
    adapters = {"lora_rank": rank, "lora_alpha": 8, "target_modules": ".*(layers|visual).*"}
    model = adapters | {"enable_gradient_checkpointing": True}
    actor = {"use_kl_loss": True, "kl_loss_coef": 0.1, "optim": {"lr": 1e-2}}
    critic = {"model": model, "optim": {"lr": 1e-3}}
    changes = {"actor_rollout_ref": {"model": model, "actor": actor}, "critic": critic}
    return context_of(fill(config_of(folder, world), changes))


def share(batch: DataProto, rank: int, world: int) -> DataProto:
    """Return this rank's rows; of two ranks the first has none with an image, where there are any."""
    if world == 1:
        return batch
    pictures = [bool(keys) for keys in batch.objects[IMAGE_KEYS]]
    if not any(pictures):
        return batch.rows(slice(rank, None, world))
    return batch.rows([row for row, has in enumerate(pictures) if has is bool(rank)])


def log_probs(policy: CausalPolicy, context: BuildContext, rows: DataProto) -> torch.Tensor:
    """Return a plain policy's log-probs of the sampled tokens, in this process alone."""
    mask = rows.ragged(LOSS_MASK).values
    packed = context.packer().pack(rows, torch.device("cpu"))
    with torch.no_grad():
        return policy(packed, banned_ids=context.renderer.banned_ids, positions=mask).log_probs


def apart(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().max())


def everywhere(value: float) -> float:
    """Return the largest value of all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def train(actor: ActorWorker, rows: DataProto) -> dict[str, Any]:
    steps = [list(range(len(rows)))]
    first, second = (actor.update(rows, steps) for _ in range(2))
    supervised = [actor.update_supervised(rows, steps)["train/loss"] for _ in range(STEPS)]
    names = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm")
    return {name: [first[name], second[name]] for name in names} | {"supervised": supervised}


def observe_actor(context: BuildContext, rows: DataProto, root: Path, world: int) -> dict[str, Any]:
    folder = Path(context.config.actor_rollout_ref.model.path)
    actor = ActorWorker.build(context, 100)
    plain = load_policy(folder, torch.float32)
    reference = actor.base_log_probs(rows).ragged(REF_LOG_PROBS).values
    seen: dict[str, Any] = {
        "same_names": [name for name, _ in actor.full_weights()] == [name for name, _ in plain.hf_named_parameters()],
        "start": everywhere(apart(actor.log_probs(rows).ragged(OLD_LOG_PROBS).values, reference)),
        "reference_is_the_model": everywhere(apart(reference, log_probs(plain, context, rows))),
    }
    seen |= train(actor, rows)
    after = actor.log_probs(rows).ragged(OLD_LOG_PROBS).values
    seen["moved"] = everywhere(apart(after, reference))
    seen["reference_moved"] = everywhere(apart(actor.base_log_probs(rows).ragged(REF_LOG_PROBS).values, reference))
    plain.hf.load_state_dict({name: tensor.clone() for name, tensor in actor.full_weights()}, strict=False)
    seen["merged"] = everywhere(apart(log_probs(plain, context, rows), after))

    actor.export(root / f"hf_{world}")
    dist.barrier()
    exported = load_policy(root / f"hf_{world}", torch.float32)
    seen["exported"] = everywhere(apart(log_probs(exported, context, rows), after))
    theirs = load_policy(folder, torch.float32)
    PeftModel.from_pretrained(theirs.hf, str(root / f"hf_{world}" / FOLDER))
    seen["exported_adapter"] = everywhere(apart(log_probs(theirs, context, rows), after))

    actor.save(root / f"actor_{world}")
    seen["bytes"] = sum(path.stat().st_size for path in (root / f"actor_{world}").iterdir())
    seen["bytes_of_the_model"] = (folder / "model.safetensors").stat().st_size
    resumed = ActorWorker.build(context, 100)
    resumed.load(root / f"actor_{world}")
    seen["resumed"] = everywhere(apart(resumed.log_probs(rows).ragged(OLD_LOG_PROBS).values, after))
    next_steps = [one.update(rows, [list(range(len(rows)))]) for one in (actor, resumed)]
    seen["next"] = [
        [metrics[name] for name in ("actor/pg_loss", "actor/grad_norm", "actor/lr")] for metrics in next_steps
    ]
    if world == 1:
        resumed.load(root / "actor_2")
        seen["resumed_from_two"] = apart(resumed.log_probs(rows).ragged(OLD_LOG_PROBS).values, after)
    return seen


def refusals(context: BuildContext, root: Path, world: int) -> dict[str, str]:
    """Return what is said of a checkpoint under other adapters, under none, and over another model."""
    policy = context.config.actor_rollout_ref
    full = replace(context.config, actor_rollout_ref=replace(policy, model=replace(policy.model, lora_rank=0)))
    other = root / "other"
    if dist.get_rank() == 0:
        other.mkdir()
        for path in Path(policy.model.path).iterdir():
            (other / path.name).write_bytes(path.read_bytes())
        weights = load_file(other / "model.safetensors")
        weights[next(name for name in weights if name.endswith("1.self_attn.k_proj.weight"))][0, 0] += 1e-6
        save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    contexts = {
        "rank": lora_context(Path(policy.model.path), world, rank=8),
        "none": replace(context, config=full),
        "model": lora_context(other, world),
    }
    said = {}
    for name, changed in contexts.items():
        actor = ActorWorker.build(changed, 100)
        try:
            actor.load(root / f"actor_{world}")
            said[name] = "nothing"
        except DataError as error:
            said[name] = str(error)
    return said


def observe_critic(context: BuildContext, rows: DataProto, root: Path, world: int) -> dict[str, Any]:
    critic, steps = CriticWorker.build(context, 100), [list(range(len(rows)))]
    found = [critic.update(rows, steps) for _ in range(3)]
    critic.save(root / f"critic_{world}")
    values = critic.values(rows).ragged(VALUES).values
    resumed = CriticWorker.build(context, 100)
    resumed.load(root / f"critic_{world}")
    critic.export(root / f"critic_hf_{world}")
    dist.barrier()
    exported = load_value_model(root / f"critic_hf_{world}", torch.float32)
    base = load_value_model(context.config.critic_model_path, torch.float32)
    adapter = LoraSettings(section="critic.model", adapter_path=str(root / f"critic_hf_{world}" / FOLDER))
    lora.add_adapters(base.backbone, adapter, context.config.critic_model_path)
    base.load_head(root / f"critic_hf_{world}")
    packed = context.packer().pack(rows, torch.device("cpu"))
    with torch.no_grad():
        seen = {
            f"critic_{name}": everywhere(apart(model(packed), values))
            for name, model in (("exported", exported), ("exported_adapter", base))
        }
    return seen | {
        "critic/vf_loss": [metrics["critic/vf_loss"] for metrics in found],
        "critic/grad_norm": [metrics["critic/grad_norm"] for metrics in found],
        "critic_resumed": everywhere(apart(resumed.values(rows).ragged(VALUES).values, values)),
    }


def main(rank: int, world: int, port: int, root: Path) -> None:
    process.start(place_of(rank, world, port))
    try:
        seen = {kind: observe(kind, rank, world, root) for kind in KINDS}
        if rank == 0:
            (root / f"seen_{world}.json").write_text(json.dumps(seen))
    finally:
        process.stop()


def observe(kind: str, rank: int, world: int, root: Path) -> dict[str, Any]:
    context = lora_context(root / kind, world)
    batch = rows_of(context, kind)
    batch = batch.rows(slice(0, len(batch) // COPIES))
    rows = share(batch, rank, world)
    below = root / f"of_{kind}"
    seen = observe_actor(context, rows, below, world) | observe_critic(context, rows, below, world)
    if (kind, world) == ("qwen2", 2):
        seen["refusals"] = refusals(context, below, world)
    if (kind, world) == ("qwen2_5_vl", 2):
        seen["shared"] = first_update_of_shared_sequences(context, batch)
    return seen


def first_update_of_shared_sequences(context: BuildContext, batch: DataProto) -> dict[str, float]:
    """Let both ranks hold all rows, each half of their tokens."""
    actor = {"ulysses_sequence_parallel_size": 2}
    shared = replace(context, config=fill(context.config, {"actor_rollout_ref": {"actor": actor}}))
    return ActorWorker.build(shared, 100).update(batch, [list(range(len(batch)))])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
