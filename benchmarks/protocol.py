"""Median times of the batch's operations on 1024 rows of 2048 tokens: `python benchmarks/protocol.py [--repeat N]`.

Eight tensors (66 MiB) and five object columns, one thread. CPU time barely moves when other jobs share the cores, wall
time does: compare the former on a busy machine.
"""

import argparse
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vrl.protocol.balance import micro_batches, partition
from vrl.protocol.columns import (
    ADVANTAGES,
    DATA_SOURCE,
    GROUND_TRUTH,
    INPUT_IDS,
    LOSS_MASK,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    RESPONSE_TEXT,
    RETURNS,
    ROLLOUT_LOG_PROBS,
    SCORE_EXTRA,
    TOKEN_LEVEL_SCORES,
    TURN_IDS,
    UID,
    VALUES,
)
from vrl.protocol.dataproto import DataProto, concat, object_column
from vrl.protocol.dispatch import assign_mini_batches, mini_batch_shares
from vrl.protocol.ragged import Ragged
from vrl.protocol.wire import load_batch, save_batch

ROWS, TOKENS, GROUP = 1024, 2048, 8


def make_batch(rows: int) -> DataProto:
    """Return a full batch of `rows` rows of equal length."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(rows + 1) * TOKENS
    total = rows * TOKENS
    values = {
        INPUT_IDS: torch.randint(0, 150_000, (total,), generator=generator),
        LOSS_MASK: torch.ones(total, dtype=torch.bool),
        TURN_IDS: torch.zeros(total, dtype=torch.int32),
        TOKEN_LEVEL_SCORES: torch.zeros(total),
        ROLLOUT_LOG_PROBS: torch.randn(total, generator=generator),
        OLD_LOG_PROBS: torch.randn(total, generator=generator),
        REF_LOG_PROBS: torch.randn(total, generator=generator),
        ADVANTAGES: torch.randn(total, generator=generator),
    }
    objects = {
        UID: object_column(f"uid-{i // GROUP:08d}" for i in range(rows)),
        DATA_SOURCE: object_column("openai/gsm8k" for _ in range(rows)),
        GROUND_TRUTH: object_column({"style": "rule", "ground_truth": str(i)} for i in range(rows)),
        SCORE_EXTRA: object_column({"index": i, "question": "q" * 200, "answer": "a" * 200} for i in range(rows)),
        RESPONSE_TEXT: object_column([{"role": "user", "content": f"question {i} " + "x" * 200}] for i in range(rows)),
    }
    return DataProto({name: Ragged(value, offsets) for name, value in values.items()}, objects)


def mini_batches(batch: DataProto) -> list[int]:
    """Iterate one shuffled epoch of mini-batches of 128 rows (16 groups), as one rank does."""
    membership = assign_mini_batches(list(batch.objects[UID]), 128 // GROUP, 1, 1, True)
    share = mini_batch_shares(membership, batch.ragged(INPUT_IDS).lengths.tolist(), 1)[0]
    return [len(batch.rows(step)) for step in share.steps]


def values(column: torch.Tensor | Ragged) -> torch.Tensor:
    """Return the memory of a column."""
    return column.values if isinstance(column, Ragged) else column


def cases(batch: DataProto) -> dict[str, Callable[[], Any]]:
    """Return the timed operations by name."""
    rng = np.random.default_rng(0)
    some = torch.from_numpy(rng.permutation(ROWS)[:512])
    mask = torch.from_numpy(rng.random(ROWS) < 0.5)
    order = torch.from_numpy(rng.permutation(ROWS))
    small = batch.rows(slice(0, 128))
    odd = batch.rows(slice(0, 1019))
    parts = batch.chunk(8)
    extra = DataProto(
        {name: Ragged(torch.randn(ROWS * TOKENS), torch.arange(ROWS + 1) * TOKENS) for name in (VALUES, RETURNS)}
    )
    copy = concat(parts)
    packed = pickle.dumps(batch, protocol=5)
    buffers: list[pickle.PickleBuffer] = []
    outside = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    return {
        "copy of all tensors (what a copy costs here)": lambda: [
            values(column).clone() for column in batch.columns.values()
        ],
        "construct": lambda: DataProto(batch.columns, batch.objects),
        "chunk(8)": lambda: batch.chunk(8),
        "chunk(8) of 1019 rows": lambda: odd.chunk(8),
        "split(128)": lambda: batch.split(128),
        "split(4) -> 256 micro-batches": lambda: batch.split(4),
        "split(4), all columns": lambda: [dict(part.columns) for part in batch.split(4)],
        "concat 8 parts": lambda: concat(parts),
        "one row x1000": lambda: [batch.rows(slice(i, i + 1)) for i in range(1000)],
        "one row x1000, from a list": lambda: [batch.rows([i]) for i in range(1000)],
        "one row x1000, all columns": lambda: [dict(batch.rows(slice(i, i + 1)).columns) for i in range(1000)],
        "rows [128:640]": lambda: batch.rows(slice(128, 640)),
        "rows, 512 random": lambda: batch.rows(some),
        "rows, boolean mask": lambda: batch.rows(mask),
        "select 3 columns": lambda: batch.select([INPUT_IDS, LOSS_MASK, UID]),
        "drop 3 columns": lambda: batch.drop([INPUT_IDS, LOSS_MASK, UID]),
        "reorder": lambda: batch.reorder(order),
        "repeat 128 x 8, interleaved": lambda: small.repeat(8),
        "repeat 128 x 8, blocks": lambda: small.repeat(8, interleave=False),
        "union, 2 new columns": lambda: batch.union(extra),
        "union, same columns again": lambda: batch.union(batch),
        "union, equal copies": lambda: batch.union(copy),
        "mini-batches of 128, one epoch": lambda: mini_batches(batch),
        "pickle.dumps": lambda: pickle.dumps(batch, protocol=5),
        "pickle.loads": lambda: pickle.loads(packed),
        "pickle.dumps, out of band": lambda: pickle.dumps(batch, protocol=5, buffer_callback=lambda _: None),
        "pickle.loads, out of band": lambda: pickle.loads(outside, buffers=buffers),
        "save and load": lambda: save_and_load(batch),
    }


def balance_cases() -> dict[str, Callable[[], Any]]:
    """Return the timed partitions by name. Lengths are log-normal with a cap."""
    rng = np.random.default_rng(0)
    out: dict[str, Callable[[], Any]] = {}
    for n, k in ((1024, 8), (1024, 64), (8192, 64), (8192, 512)):
        lengths = np.clip(np.exp(rng.normal(7.0, 1.0, n)).astype(int), 32, 16384).tolist()
        for equal in (True, False):
            parts = partition(lengths, k, equal_counts=equal)
            ratio = max(sum(lengths[i] for i in part) for part in parts) * k / sum(lengths)
            name = f"partition {n} into {k}, {'equal' if equal else 'free'} counts (max/mean {ratio:.4f})"
            out[name] = lambda lengths=lengths, k=k, equal=equal: partition(lengths, k, equal_counts=equal)
    lengths = np.clip(np.exp(rng.normal(6.5, 0.9, 512)).astype(int), 32, 4096).tolist()
    out["micro_batches, 512 rows, 16384 tokens"] = lambda: micro_batches(lengths, 16384)
    out["micro_batches, 512 rows of 0.4 of the limit"] = lambda: micro_batches([400 + i % 20 for i in range(512)], 1000)
    return out


def save_and_load(batch: DataProto) -> None:
    """Write the batch to a folder that is removed again, and read it."""
    with tempfile.TemporaryDirectory() as folder:
        save_batch(batch, Path(folder) / "batch")
        load_batch(Path(folder) / "batch")


def measure(operation: Callable[[], Any], repeat: int) -> tuple[float, float]:
    """Return median wall and CPU seconds after one warm-up."""
    walls, cpus = [], []
    for _ in range(repeat + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        result = operation()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        del result
    return statistics.median(walls[1:]), statistics.median(cpus[1:])


def main() -> None:
    """Print one line an operation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=7)
    repeat = parser.parse_args().repeat
    torch.set_num_threads(1)
    batch = make_batch(ROWS)
    sys.stdout.write(
        f"{batch.nbytes() / 2**20:.0f} MiB, load average {os.getloadavg()[0]:.1f}; milliseconds, medians of {repeat}\n"
    )
    sys.stdout.write(f"{'operation':62} {'wall':>9} {'cpu':>9}\n")
    for name, operation in (cases(batch) | balance_cases()).items():
        wall, cpu = measure(operation, repeat)
        sys.stdout.write(f"{name:62} {wall * 1000:9.3f} {cpu * 1000:9.3f}\n")


if __name__ == "__main__":
    main()
