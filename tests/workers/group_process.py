"""One rank of test_whole_groups.py: one update of a fresh actor for each cut and loss, on the shares of dispatch."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.workers.rig import config_of, context_of
from vrl.algorithms.segments import row_sum
from vrl.protocol.columns import (
    ADVANTAGES,
    GROUP,
    IMAGE_KEYS,
    INPUT_IDS,
    LOSS_MASK,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    ROLLOUT_LOG_PROBS,
    TOKEN_LEVEL_REWARDS,
    TURN_IDS,
)
from vrl.protocol.config.builder import fill
from vrl.protocol.dataproto import DataProto, object_column
from vrl.protocol.dispatch import mini_batch_shares
from vrl.protocol.ragged import Ragged
from vrl.workers import process
from vrl.workers.actor import ActorWorker
from vrl.workers.process import RankPlace

SIZES = {"tba": (3, 1, 4, 2, 5, 2), "dpo": (2, 2, 2, 2, 2)}  # rows of each group; a group alone has loss 0


def rows_of(sizes: tuple[int, ...]) -> DataProto:
    """Return rows of 6 to 24 random tokens, groups mixed with one another, the last token of a row with its score."""
    draw = torch.Generator().manual_seed(3)
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    groups = groups[torch.randperm(len(groups), generator=draw)]
    lengths = torch.randint(6, 25, (len(groups),), generator=draw).tolist()
    ids = Ragged.from_rows([torch.randint(30, 200, (n,), generator=draw).tolist() for n in lengths], torch.int64)
    masks = [[0] * 4 + [1] * (n - 4) for n in lengths]
    mask = Ragged.from_rows(masks, torch.bool)
    ref = torch.where(mask.values, torch.randn(len(ids.values), generator=draw) * 0.1 - 4.0, 0.0)
    rewards = torch.zeros(len(ids.values))
    rewards[ids.offsets[1:] - 1] = torch.randn(len(groups), generator=draw)
    zeros = Ragged(torch.zeros(len(ids.values)), ids.offsets)
    columns: dict[str, Any] = {
        INPUT_IDS: ids,
        LOSS_MASK: mask,
        GROUP: groups,
        ADVANTAGES: zeros,
        ROLLOUT_LOG_PROBS: zeros,
        REF_LOG_PROBS: Ragged(ref, ids.offsets),
        TOKEN_LEVEL_REWARDS: Ragged(rewards, ids.offsets),
        TURN_IDS: Ragged.from_rows([[k - 1 for k in row] for row in masks], torch.int32),
    }
    return DataProto(columns, {IMAGE_KEYS: object_column(() for _ in lengths)})


def weights(actor: ActorWorker) -> torch.Tensor:
    return torch.cat([value.detach().reshape(-1).clone() for _, value in actor.full_weights()])


def measure(folder: Path, world: int, settings: dict[str, Any], loss: dict[str, Any]) -> dict[str, Any]:
    changed = {"actor_rollout_ref": {"actor": {**settings, "policy_loss": loss}}}
    context = context_of(fill(config_of(folder, world), changed))
    batch = rows_of(SIZES[loss["loss_mode"]])
    actor = ActorWorker.build(context, total_steps=10)
    shared_by = settings.get("ulysses_sequence_parallel_size", 1)
    lengths = batch.ragged(INPUT_IDS).lengths.tolist()
    membership = torch.zeros(len(batch), 1, dtype=torch.int64)
    shares = mini_batch_shares(membership, lengths, world // shared_by, batch.dense(GROUP))
    share = shares[int(os.environ["RANK"]) // shared_by]
    before = weights(actor)
    found: dict[str, Any] = {}
    if world == 1:
        log_probs = actor.log_probs(batch).ragged(OLD_LOG_PROBS)
        sums = {"policy": log_probs, "ref": batch.ragged(REF_LOG_PROBS), "score": batch.ragged(TOKEN_LEVEL_REWARDS)}
        found["rows"] = {name: row_sum(x.values.double(), x.offsets).tolist() for name, x in sums.items()}
        found["rows"]["group"] = batch.dense(GROUP).tolist()
    else:
        found["rows"] = None
    metrics = actor.update(batch.rows(share.rows), share.steps)
    found |= {name: value for name, value in metrics.items() if name.startswith("actor/") and "timing" not in name}
    return found | {"moved": float((weights(actor) - before).norm())}


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
    found = {
        cut: {name: measure(Path(given["folder"]), world, settings, loss) for name, loss in given["losses"].items()}
        for cut, settings in given["cuts"].items()
    }
    if rank == 0:
        Path(given["out"]).write_text(json.dumps(found))
    process.stop()


if __name__ == "__main__":
    main()
