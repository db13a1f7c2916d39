"""One rank of test_reward_model.py: scores its part of the rows in each case; rank 0 writes all scores in order."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.workers.rig import context_of, place_of
from vrl.protocol.columns import INPUT_IDS, LOSS_MASK, MESSAGES, RESPONSE_TEXT, RM_CUT_TOKENS, RM_SCORES
from vrl.protocol.config.builder import build
from vrl.protocol.dataproto import DataProto, object_column
from vrl.protocol.ragged import Ragged
from vrl.workers import process
from vrl.workers.reward_model import RewardModelWorker


def rows_of(given: list[dict[str, Any]]) -> DataProto:
    ids = Ragged.from_rows([row["ids"] for row in given], torch.int64)
    mask = Ragged(torch.ones(len(ids.values), dtype=torch.bool), ids.offsets)
    objects = {
        MESSAGES: object_column(row["messages"] for row in given),
        RESPONSE_TEXT: object_column(row["answer"] for row in given),
    }
    return DataProto({INPUT_IDS: ids, LOSS_MASK: mask}, objects)


def score(settings: dict[str, Any], policy: str, batch: DataProto) -> list[tuple[float, int]]:
    world = dist.get_world_size()
    config = build(
        {
            "actor_rollout_ref": {"model": {"path": policy}},
            "reward_model": {"enable": True, **settings},
            "trainer": {"n_gpus_per_node": world, "device": "cpu"},
        }
    )
    shared_by = config.sequence_parallel_size("reward_model")
    parts = world // shared_by
    first = 1 if parts > 1 else len(batch)
    mine = batch.rows(slice(0, first)) if dist.get_rank() // shared_by == 0 else batch.rows(slice(first, None))
    found = RewardModelWorker.build(context_of(config)).score(mine)
    columns = [found.dense(RM_SCORES).tolist(), found.dense(RM_CUT_TOKENS).tolist()] if len(mine) else [[], []]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, list(zip(*columns, strict=True)))
    return [entry for part in everyone[::shared_by] for entry in part]


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    process.start(place_of(rank, world, int(os.environ["MASTER_PORT"])))
    batch = rows_of(given["rows"])
    found = [score(case, given["policy"], batch.rows(slice(0, case.pop("rows", None)))) for case in given["cases"]]
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))
    process.stop()


if __name__ == "__main__":
    main()
