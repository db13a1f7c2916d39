"""What it saves to compute a prompt once for its samples: `python -m benchmarks.shared_prompts [ROUNDS]`.

The learner's update and its log-probs on 8 prompts of 64 tokens with 8 responses each, of 64 tokens and of log-normal
lengths: throughput with shared prompts over that with each row by itself. One rank, one thread, the model of
`benchmarks/training.py`; CPU seconds, in turn, median with quartiles.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.training import compare, free_port, learner_of, objective, place, ratio, rows_of
from benchmarks.training import model_folder as folder_in
from vrl.models.packing import PackedBatch
from vrl.protocol.columns import INPUT_IDS, LOSS_MASK
from vrl.protocol.dataproto import DataProto
from vrl.protocol.ragged import Ragged
from vrl.workers import process
from vrl.workers.learner import BatchLimits
from vrl.workers.microbatch import Packer

PROMPTS, SAMPLES, PROMPT_TOKENS = 8, 8, 64
BUDGET = 2048  # tokens a micro-batch


def prompts_in_turn(responses: Sequence[int]) -> DataProto:
    """Return rows of the prompts in turn, with responses of so many tokens."""
    rows = rows_of([PROMPT_TOKENS + n for n in responses], [PROMPT_TOKENS] * len(responses))
    ids = [row.tolist() for row in rows.ragged(INPUT_IDS).to_rows()]
    ids = [ids[i - i % SAMPLES][:PROMPT_TOKENS] + row[PROMPT_TOKENS:] for i, row in enumerate(ids)]
    return DataProto({**rows.columns, INPUT_IDS: Ragged.from_rows(ids, torch.int64)})


def log_probs(policy: nn.Module, packed: PackedBatch, rows: DataProto) -> list[Tensor]:
    """Return the log-probs of sampled tokens."""
    return [policy(packed, positions=rows.ragged(LOSS_MASK).values).log_probs]


def measure(folder: Path, responses: Sequence[int], rounds: int) -> None:
    """Print the ratios for one batch."""
    rows, loss = prompts_in_turn(responses), objective()
    shared, alone = learner_of(folder), learner_of(folder)
    shared.packer = Packer(None, needs_positions=False, share_prompts=True)
    shared.limits = alone.limits = BatchLimits(max_tokens=BUDGET)
    members = [list(range(len(rows)))]
    seconds = compare(
        rounds,
        update_shared=lambda: shared.update(rows, members, loss),
        update_alone=lambda: alone.update(rows, members, loss),
        infer_shared=lambda: shared.infer(rows, log_probs),
        infer_alone=lambda: alone.infer(rows, log_probs),
    )
    tokens, answered = len(rows.ragged(INPUT_IDS).values), sum(responses)
    print(f"{len(rows)} rows, {tokens} tokens, {PROMPTS * PROMPT_TOKENS + answered} with each prompt once:")
    for name in ("update", "infer"):
        found = ratio(seconds[f"{name}_alone"], seconds[f"{name}_shared"])
        print(f"  {name}, shared prompts / each row by itself: {found}", flush=True)


def main() -> None:
    """Measure both batches."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rounds", nargs="?", type=int, default=8)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    place(0, 1, free_port())
    draw = torch.randn(PROMPTS * SAMPLES, generator=torch.Generator().manual_seed(2))
    long_tailed = (0.8 * draw + 3.4).exp().clamp(1, 256).long().tolist()
    with tempfile.TemporaryDirectory() as root:
        folder = folder_in(Path(root))
        for responses in ([64] * (PROMPTS * SAMPLES), long_tailed):
            measure(folder, responses, rounds)
    process.stop()


if __name__ == "__main__":
    main()
