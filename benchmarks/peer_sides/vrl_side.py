"""vrl's side of what needs no other process: `python -m benchmarks.peer_sides.vrl_side PART ROWS WIDTH OUT`.

PART is `algorithms`, `batch` or `balance`. Results to compare with the peer's go to the file OUT.
"""

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peer_sides.batch_workload import SIZES, Rows, imbalance, token_counts
from benchmarks.peer_sides.rounds import Case, private_stdout, serve, versions
from benchmarks.protocol import TOKENS, make_batch, mini_batches, save_and_load
from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageParams, get_advantage
from vrl.protocol.balance import partition
from vrl.protocol.columns import INPUT_IDS, LOSS_MASK, RETURNS, UID, VALUES
from vrl.protocol.dataproto import DataProto, concat
from vrl.protocol.ragged import Ragged, offsets_of

Part = tuple[dict[str, Case], dict[str, Any]]


def algorithms(rows: int, width: int, out: Path) -> Part:
    """Estimators on flat rows, every token sampled."""
    padded = Rows.drawn(rows, width)
    inputs = AdvantageInputs(
        token_level_rewards=padded.scores[padded.mask],
        mask=torch.ones(int(padded.lengths.sum()), dtype=torch.bool),
        group=padded.group,
        offsets=offsets_of(padded.lengths),
        values=padded.values[padded.mask],
    )
    params = AdvantageParams(gamma=1.0, lam=0.95)
    names = {"gae": "gae", "grpo": "grpo", "rloo": "rloo", "reinforce++": "reinforce_plus_plus"}
    results: dict[str, Any] = {}
    cases: dict[str, Case] = {}
    for label, name in names.items():
        estimator = get_advantage(name)
        results[label] = estimator(inputs, params).advantages.numpy()
        cases[label] = Case(lambda _, estimator=estimator: estimator(inputs, params), seconds=0.1)
    np.savez(out, **results)
    return cases, {"tokens": int(padded.lengths.sum())}


def batch(rows: int, _width: int, _out: Path) -> Part:
    """Operations of `DataProto`. Rows are cut when a column is asked for: with and without that."""
    whole = make_batch(rows)
    rng = np.random.default_rng(0)
    some, order = (torch.from_numpy(rng.permutation(rows)) for _ in range(2))
    some, mask = some[: rows // 2], torch.from_numpy(rng.random(rows) < 0.5)
    small, odd, parts = whole.rows(slice(0, rows // 8)), whole.rows(slice(0, rows - 5)), whole.chunk(8)
    copy, packed = concat(parts), pickle.dumps(whole, protocol=5)
    offsets = torch.arange(rows + 1) * TOKENS
    extra = DataProto({name: Ragged(torch.randn(rows * TOKENS), offsets) for name in (VALUES, RETURNS)})

    def one(i: int) -> slice:
        return slice(i % rows, i % rows + 1)

    operations: dict[str, Callable[[], Any]] = {
        "construct": lambda: DataProto(whole.columns, whole.objects),
        "chunk(8)": lambda: whole.chunk(8),
        "chunk(8), all columns read": lambda: all_columns(whole.chunk(8)),
        "split(128)": lambda: whole.split(128),
        "split(4) -> 256 micro-batches": lambda: whole.split(4),
        "split(4), all columns read": lambda: all_columns(whole.split(4)),
        "concat 8 parts": lambda: concat(parts),
        "one row x 1000": lambda: [whole.rows(one(i)) for i in range(1000)],
        "one row x 1000, all columns read": lambda: all_columns(whole.rows(one(i)) for i in range(1000)),
        "half the rows, one run": lambda: all_columns([whole.rows(slice(rows // 8, rows * 5 // 8))]),
        "half the rows, random": lambda: whole.rows(some),
        "half the rows, mask": lambda: whole.rows(mask),
        "select 3 columns": lambda: whole.select([INPUT_IDS, LOSS_MASK, UID]),
        "reorder": lambda: whole.reorder(order),
        "repeat x 8, interleaved": lambda: small.repeat(8),
        "repeat x 8, blocks": lambda: small.repeat(8, interleave=False),
        "union, 2 new columns": lambda: whole.union(extra),
        "union, equal copies": lambda: whole.union(copy),
        "drop 3 columns": lambda: whole.drop([INPUT_IDS, LOSS_MASK, UID]),
        "1019 rows to 8 ranks and back": lambda: concat(odd.chunk(8)),
        "mini-batches of 128, one epoch": lambda: mini_batches(whole),
        "pickle.dumps": lambda: pickle.dumps(whole, protocol=5),
        "pickle.loads": lambda: pickle.loads(packed),
        "save and load": lambda: save_and_load(whole),
    }
    return {name: Case(lambda _, run=run: run()) for name, run in operations.items()}, {"mib": whole.nbytes() / 2**20}


def all_columns(parts: Any) -> list[dict[str, Tensor | Ragged]]:
    """Ask for every column of every part."""
    return [dict(part.columns) for part in parts]


def balance(_rows: int, _width: int, _out: Path) -> Part:
    """Cut rows into parts."""
    cases: dict[str, Case] = {}
    ratios: dict[str, float] = {}
    for rows, parts in SIZES:
        lengths = token_counts(rows)
        for equal in (True, False):
            name = f"{rows} rows, {parts} parts, {'equal' if equal else 'free'} counts"
            cases[name] = Case(lambda _, n=lengths, k=parts, equal=equal: partition(n, k, equal_counts=equal))
            ratios[name] = imbalance(lengths, partition(lengths, parts, equal_counts=equal))
    return cases, {"imbalance": ratios}


PARTS = {"algorithms": algorithms, "batch": batch, "balance": balance}


def main() -> None:
    """Serve one part."""
    channel = private_stdout()
    torch.set_num_threads(1)
    part, rows, width, out = sys.argv[1:]
    cases, facts = PARTS[part](int(rows), int(width), Path(out))
    serve(cases, {"versions": versions(["torch", "numpy"]), **facts}, channel)


if __name__ == "__main__":
    main()
