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
from torch import Tensor

from benchmarks.training import VOCABULARY, compare, free_port, learner_of, objective, place, ratio
from benchmarks.training import model_folder as folder_in
from vrl.models.packing import PackedBatch
from vrl.models.policy import CausalPolicy
from vrl.protocol.columns import ADVANTAGES, INPUT_IDS, LOSS_MASK, OLD_LOG_PROBS, ROLLOUT_LOG_PROBS, TURN_IDS
from vrl.protocol.dataproto import DataProto
from vrl.protocol.ragged import Ragged
from vrl.workers import process
from vrl.workers.learner import BatchLimits
from vrl.workers.microbatch import Packer

PROMPTS, SAMPLES, PROMPT_TOKENS = 8, 8, 64
BUDGET = 2048  # tokens a micro-batch


def rows_of(responses: Sequence[int]) -> DataProto:
    """Return rows of the prompts in turn, with responses of so many tokens."""
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, VOCABULARY, (PROMPTS, PROMPT_TOKENS), generator=draw).tolist()
    answers = [torch.randint(0, VOCABULARY, (n,), generator=draw).tolist() for n in responses]
    ids = Ragged.from_rows([prompts[i // SAMPLES] + answer for i, answer in enumerate(answers)], torch.int64)
    masks = [[False] * PROMPT_TOKENS + [True] * n for n in responses]
    noise = [torch.randn(len(ids.values), generator=draw) for _ in range(3)]
    return DataProto(
        {
            INPUT_IDS: ids,
            LOSS_MASK: Ragged.from_rows(masks, torch.bool),
            TURN_IDS: Ragged.from_rows([[int(sampled) - 1 for sampled in mask] for mask in masks], torch.int32),
            ADVANTAGES: Ragged(noise[0], ids.offsets),
            OLD_LOG_PROBS: Ragged(0.1 * noise[1] - 9.0, ids.offsets),
            ROLLOUT_LOG_PROBS: Ragged(0.1 * noise[2] - 9.0, ids.offsets),
        }
    )


def log_probs(policy: CausalPolicy, packed: PackedBatch, rows: DataProto) -> list[Tensor]:
    """Return the log-probs of sampled tokens."""
    return [policy(packed, positions=rows.ragged(LOSS_MASK).values).log_probs]


def measure(folder: Path, responses: Sequence[int], rounds: int) -> None:
    """Print the ratios for one batch."""
    rows, loss = rows_of(responses), objective()
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
