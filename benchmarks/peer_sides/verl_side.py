"""verl's side of everything but the training step: `python -m benchmarks.peer_sides.verl_side PART ROWS WIDTH OUT`.

The same parts, rows and case names as in vrl_side.py; runs in an environment of its own, without vrl.
"""

import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo import core_algos
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from benchmarks.peer_sides.batch_workload import SIZES, Rows, imbalance, token_counts
from benchmarks.peer_sides.rounds import Case, private_stdout, serve, versions

Part = tuple[dict[str, Case], dict[str, Any]]
TOO_SLOW = {(8192, 64), (8192, 512)}  # seconds with free counts


@dataclass(frozen=True)
class Discount:
    """The one setting that REINFORCE++ reads."""

    gamma: float = 1.0


def algorithms(rows: int, width: int, out: Path) -> Part:
    """Estimators on padded rows."""
    padded = Rows.drawn(rows, width)
    mask, scores = padded.mask.float(), padded.scores
    uid = np.array([f"uid-{group:08d}" for group in padded.group.tolist()], dtype=object)
    runs: dict[str, Callable[[], Any]] = {
        "gae": lambda: core_algos.compute_gae_advantage_return(scores, padded.values, mask, 1.0, 0.95),
        "grpo": lambda: core_algos.compute_grpo_outcome_advantage(scores, mask, uid),
        "rloo": lambda: core_algos.compute_rloo_outcome_advantage(scores, mask, uid),
        "reinforce++": lambda: core_algos.compute_reinforce_plus_plus_outcome_advantage(
            scores, mask, config=Discount()
        ),
    }
    np.savez(out, **{name: run()[0][padded.mask].numpy() for name, run in runs.items()})
    return {name: Case(lambda _, run=run: run(), seconds=0.1) for name, run in runs.items()}, {}


def object_column(values: Iterable[Any]) -> npt.NDArray[Any]:
    """Return a 1-D object array."""
    items = list(values)
    column = np.empty(len(items), dtype=object)
    column[:] = items
    return column


def make_batch(rows: int) -> DataProto:
    """Return a batch of full rows: 2048 tokens, half of them response."""
    generator = torch.Generator().manual_seed(0)
    tokens, response = 2048, 1024
    tensors = {
        "input_ids": torch.randint(0, 150_000, (rows, tokens), generator=generator),
        "attention_mask": torch.ones(rows, tokens, dtype=torch.int64),
        "position_ids": torch.arange(tokens).repeat(rows, 1),
        "responses": torch.randint(0, 150_000, (rows, response), generator=generator),
        "response_mask": torch.ones(rows, response, dtype=torch.int64),
        "old_log_probs": torch.randn(rows, response, generator=generator),
        "ref_log_prob": torch.randn(rows, response, generator=generator),
        "token_level_scores": torch.zeros(rows, response),
    }
    objects = {
        "uid": object_column(f"uid-{i // 8:08d}" for i in range(rows)),
        "data_source": object_column("openai/gsm8k" for _ in range(rows)),
        "reward_model": object_column({"style": "rule", "ground_truth": str(i)} for i in range(rows)),
        "extra_info": object_column({"index": i, "question": "q" * 200, "answer": "a" * 200} for i in range(rows)),
        "raw_prompt": object_column([{"role": "user", "content": f"question {i} " + "x" * 200}] for i in range(rows)),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=objects, meta_info={"global_steps": 3})


def again(batch: DataProto) -> DataProto:
    """Return a new container over the same columns, for operations that change it in place."""
    return DataProto.from_dict(tensors=dict(batch.batch.items()), non_tensors=dict(batch.non_tensor_batch))


def padded_and_back(batch: DataProto) -> DataProto:
    """Fill up to a multiple of 8, cut, join, and take the filling off."""
    filled, added = pad_dataproto_to_divisor(batch, 8)
    return unpad_dataproto(DataProto.concat(filled.chunk(8)), added)


def save_and_load(batch: DataProto) -> None:
    """Write the batch to a file that is removed again, and read it."""
    with tempfile.TemporaryDirectory() as folder:
        batch.save_to_disk(f"{folder}/batch")
        DataProto.load_from_disk(f"{folder}/batch")


def batch(rows: int, _width: int, _out: Path) -> Part:
    """Operations of `DataProto`."""
    whole = make_batch(rows)
    rng = np.random.default_rng(0)
    some, order = (torch.from_numpy(rng.permutation(rows)) for _ in range(2))
    some, mask = some[: rows // 2], torch.from_numpy(rng.random(rows) < 0.5)
    small, odd, parts = whole[: rows // 8], whole[: rows - 5], whole.chunk(8)
    copy, packed = DataProto.concat(parts), pickle.dumps(whole, protocol=5)
    width = whole.batch["responses"].shape[1]
    extra = DataProto.from_dict(tensors={name: torch.randn(rows, width) for name in ("values", "returns")})
    removed = ["input_ids", "attention_mask"]

    def fresh() -> DataProto:
        return again(whole)

    cases = {
        "construct": lambda _: again(whole),
        "chunk(8)": lambda _: whole.chunk(8),
        "split(128)": lambda _: whole.split(128),
        "split(4) -> 256 micro-batches": lambda _: whole.split(4),
        "chunk(8), all columns read": lambda _: whole.chunk(8),
        "split(4), all columns read": lambda _: whole.split(4),
        "concat 8 parts": lambda _: DataProto.concat(parts),
        "one row x 1000": lambda _: [whole[i % rows] for i in range(1000)],
        "one row x 1000, all columns read": lambda _: [whole[i % rows] for i in range(1000)],
        "half the rows, one run": lambda _: whole[rows // 8 : rows * 5 // 8],
        "half the rows, random": lambda _: whole.select_idxs(some),
        "half the rows, mask": lambda _: whole.select_idxs(mask),
        "select 3 columns": lambda _: whole.select(batch_keys=removed, non_tensor_batch_keys=["uid"]),
        "repeat x 8, interleaved": lambda _: small.repeat(8, interleave=True),
        "repeat x 8, blocks": lambda _: small.repeat(8, interleave=False),
        "1019 rows to 8 ranks and back": lambda _: padded_and_back(odd),
        "mini-batches of 128, one epoch": lambda _: [len(part) for part in whole.make_iterator(128, 1, seed=1)],
        "pickle.dumps": lambda _: pickle.dumps(whole, protocol=5),
        "pickle.loads": lambda _: pickle.loads(packed),
        "save and load": lambda _: save_and_load(whole),
    }
    in_place = {
        "reorder": lambda one: one.reorder(order),
        "union, 2 new columns": lambda one: one.union(extra),
        "union, equal copies": lambda one: one.union(copy),
        "drop 3 columns": lambda one: one.pop(batch_keys=removed, non_tensor_batch_keys=["uid"]),
    }
    out = {name: Case(run) for name, run in cases.items()}
    out |= {name: Case(run, prepare=fresh) for name, run in in_place.items()}
    return out, {"mib": sum(tensor.nbytes for tensor in whole.batch.values()) / 2**20}


def balance(_rows: int, _width: int, _out: Path) -> Part:
    """Karmarkar-Karp, verl's default."""
    cases: dict[str, Case] = {}
    ratios: dict[str, float] = {}
    for rows, parts in SIZES:
        lengths = token_counts(rows)
        for equal in (True, False):
            if not equal and (rows, parts) in TOO_SLOW:
                continue
            name = f"{rows} rows, {parts} parts, {'equal' if equal else 'free'} counts"
            cases[name] = Case(
                lambda _, n=lengths, k=parts, equal=equal: get_seqlen_balanced_partitions(n, k, equal_size=equal)
            )
            ratios[name] = imbalance(lengths, get_seqlen_balanced_partitions(lengths, parts, equal_size=equal))
    return cases, {"imbalance": ratios}


@ray.remote
class Echo(Worker):
    """A worker whose method costs nothing but the transport of the rows."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def shifted(self, data: DataProto) -> DataProto:
        """Return one column, changed."""
        return DataProto.from_dict(tensors={"old_log_probs": data.batch["old_log_probs"] + 1.0})


def over_ray(rows: int, _width: int, _out: Path) -> Part:
    """Object store and worker group."""
    ray.init(num_cpus=20, include_dashboard=False, log_to_driver=False, object_store_memory=2 * 2**30)
    pool = RayResourcePool([2], use_gpu=False)
    group: Any = RayWorkerGroup(pool, RayClassWithInitArgs(Echo))
    whole = make_batch(rows)
    stored = ray.put(whole)
    cases = {
        "ray.put": Case(lambda _: ray.put(whole)),
        "ray.get": Case(lambda _: ray.get(stored)),
        "worker-group call, 2 ranks": Case(lambda _: group.shifted(whole), most_calls=10, seconds=10.0),
    }
    return cases, {"mib": sum(tensor.nbytes for tensor in whole.batch.values()) / 2**20}


PARTS = {"algorithms": algorithms, "batch": batch, "balance": balance, "ray": over_ray}


def main() -> None:
    """Serve one part."""
    channel = private_stdout()
    torch.set_num_threads(1)
    part, rows, width, out = sys.argv[1:]
    cases, facts = PARTS[part](int(rows), int(width), Path(out))
    serve(cases, {"versions": versions(["torch", "numpy", "ray", "verl", "tensordict"]), **facts}, channel)


if __name__ == "__main__":
    main()
