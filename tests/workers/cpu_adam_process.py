"""One rank of test_cpu_adam.py: learners with AdamW and CPU Adam side by side, then a checkpoint and a step more."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import _get_build_directory

from tests.workers.invariance import Way
from tests.workers.learner_process import learner_of, objective_of, rows_of, share_of, weights
from tests.workers.rig import config_of, context_of, place_of
from vrl.models.loading import load_policy, load_value_model
from vrl.protocol.config.builder import fill
from vrl.protocol.dataproto import DataProto
from vrl.workers import checkpoint, process
from vrl.workers.building import BuildContext
from vrl.workers.learner import Learner, Loss
from vrl.workers.losses import ValueObjective

STEPS = 5
WAY = Way(name="2 ranks", world=2)


def measure(
    context: BuildContext, load: Callable[..., Any], loss: Loss, mine: DataProto, folder: Path
) -> dict[str, Any]:
    def fresh(optimizer: str) -> Learner:
        torch.manual_seed(0)  # of a new value head
        changed = fill(context.config, {"actor_rollout_ref": {"actor": {"optim": {"optimizer": optimizer}}}})
        return learner_of(replace(context, config=changed), load, WAY)

    def step(learner: Learner) -> torch.Tensor:
        learner.update(mine, [list(range(len(mine)))], loss)
        return weights(learner)

    def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
        """Return the largest difference: of the weights themselves, relative where they are above 1."""
        return float(((found - wanted).abs() / wanted.abs().clamp(min=1.0)).max())

    plain, ours = fresh("AdamW"), fresh("DeepSpeedCPUAdam")
    first = weights(ours)
    steps = [apart(step(ours), step(plain)) for _ in range(STEPS)]
    checkpoint.save(folder, ours)
    again = fresh("DeepSpeedCPUAdam")
    checkpoint.load(folder, again)
    return {
        "moved": apart(weights(ours), first),
        "apart": steps,
        "apart_when_read": apart(weights(again), weights(ours)),
        "apart_a_step_later": apart(step(again), step(ours)),
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    rank, world, out = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(given["out"])
    process.start(place_of(rank, world, int(os.environ["MASTER_PORT"])))
    Path(_get_build_directory("cpu_adam", verbose=False), "lock").touch()  # as a killed build leaves it
    context = context_of(config_of(Path(given["folder"]), world))
    rows = rows_of(context, "qwen2")
    mine = rows.rows(share_of(len(rows), rank, world, WAY))
    roles = {
        "actor": (load_policy, objective_of(context)),
        "critic": (load_value_model, ValueObjective(cliprange_value=0.5, mode="token-mean", norm_length=None)),
    }
    found = {role: measure(context, *made, mine, out.with_name(role)) for role, made in roles.items()}
    if rank == 0:
        out.write_text(json.dumps(found))
    process.stop()


if __name__ == "__main__":
    main()
