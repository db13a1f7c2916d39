"""One of two ranks: trains, syncs and generates with one engine a rank, then with one engine over both.

`test_agreement` runs it as `python -m tests.workers.rank_agreement RANK PORTS MODEL_FOLDER OUT_FILE`, with a port for
each of the two groups, and reads what it saw from the file.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.workers.rig import Rig, config_of, drive, place_of, prompts_of
from tests.workers.turns import KIND, acting_rows
from vrl.protocol.columns import LOSS_MASK
from vrl.protocol.dataproto import DataProto
from vrl.protocol.trajectory import Sampling
from vrl.workers import process

WORLD = 2
GREEDY = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)
FREE = Sampling(max_tokens=16, seed=1)
TOOLS = {
    "agent": {"environments": {"scripted": {"class": KIND}}, "max_turns": 3, "concurrent_workers": 1},
    "max_model_len": 1024,
    "limit_images": 3,
}


def my_rows(rig: Rig, batch: DataProto | None) -> DataProto:
    """Return this rank's share of its engine's rows, for the learner."""
    if rig.place.group is None:
        assert batch is not None
        return batch
    box = [batch]
    dist.broadcast_object_list(box, src=rig.place.leader_rank, group=rig.place.group)
    assert box[0] is not None
    return box[0].rows(slice(dist.get_rank(), None, WORLD))


def observe(rig: Rig) -> dict[str, Any]:
    prompts = prompts_of("qwen2_5_vl")
    seen: dict[str, Any] = {}
    rig.rollout.sync_weights(rig.actor, 0)
    for name, sampling in (("greedy", GREEDY), ("sampled", FREE)):
        outputs = drive(rig.engine, [rig.request(p.uid, p, sampling) for p in prompts])
        seen[name] = {uid: output.ids for uid, output in outputs.items()}
    first = my_rows(rig, rig.generate(prompts, FREE))
    seen["rows"] = len(first)
    seen["before"] = rig.difference(first)
    acted = my_rows(rig, rig.generate(acting_rows("qwen2_5_vl"), FREE, step=1))
    seen["turns"] = int(acted.ragged(LOSS_MASK).values.sum()), rig.difference(acted)
    seen["grad_norm"] = rig.train(first, rig.actor)["actor/grad_norm"]
    seen["unsynced"] = rig.difference(my_rows(rig, rig.generate(prompts, FREE)))
    rig.rollout.sync_weights(rig.actor, 1)
    seen["version"] = rig.rollout.policy_version
    seen["after"] = rig.difference(my_rows(rig, rig.generate(prompts, FREE)))
    seen["compiled"] = counters["stats"]["unique_graphs"]
    return seen


def main(rank: int, ports: list[int], folder: Path, out: Path) -> None:
    seen = {}
    for tensor_parallel, port in zip((1, 2), ports, strict=True):
        process.start(place_of(rank, WORLD, port))
        rig = Rig.build(
            config_of(folder, world=WORLD, tensor_model_parallel_size=tensor_parallel, response=560, **TOOLS)
        )
        seen[tensor_parallel] = observe(rig)
        rig.close()
        process.stop()
    out.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(port) for port in sys.argv[2].split(",")], Path(sys.argv[3]), Path(sys.argv[4]))
