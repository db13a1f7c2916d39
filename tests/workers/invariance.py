"""One update of the learner however it is cut and placed: the ways, a run of them, and how far each is from the first.

`test_learner.py` runs it and holds the deviations against their bound; the table of docs/results comes from there.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
SCALARS = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm")
PER_TOKEN = ("log_probs", "entropy", "values")


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the rows of a mini-batch are cut, and where the model's parts are."""

    name: str
    world: int = 1
    max_tokens: int = 10_000
    rows: int | None = None
    first_rank: int | None = None  # rows of rank 0; None: half
    shared_by: int = 1  # ranks that share their sequences
    fsdp_size: int = -1
    checkpointing: bool = False
    offload: bool = False
    padded: bool = False
    share_prompts: bool = False
    adapter: str = ""  # LoRA "beside" the weights, or "merged" into them
    dtype: str = "auto"  # of computation
    mode: str = "token-mean"  # how the loss is aggregated
    first_rows: int | None = None  # so many of the rows; None: all
    compared_with: str = "packed, one rank, one micro-batch"


WHOLE = Way(name="packed, one rank, one micro-batch")
WAYS = (
    Way(name="padded, by transformers' own forward", padded=True),
    Way(name="micro-batches of 1 row", rows=1),
    Way(name="micro-batches of 3 rows", rows=3),
    Way(name="micro-batches of 90 tokens", max_tokens=90),
    Way(name="gradient checkpointing", checkpointing=True),
    Way(name="offload of parameters, optimizer, activations", offload=True),
    Way(name="2 ranks (fsdp_size 2)", world=2),
    Way(name="2 ranks, fsdp_size 1", world=2, fsdp_size=1),
    Way(name="2 ranks, micro-batches of 1 row", world=2, rows=1),
    Way(name="2 ranks, micro-batches of 70 tokens", world=2, max_tokens=70),
    Way(name="2 ranks, one without a row", world=2, first_rank=0),
    Way(name="2 ranks, very unequal shares", world=2, first_rank=6),
    Way(name="2 ranks, gradient checkpointing and offload", world=2, checkpointing=True, offload=True),
    Way(name="sequence parallel 2", world=2, shared_by=2),
    Way(name="sequence parallel 2, micro-batches of 1 row", world=2, rows=1, shared_by=2),
    Way(name="sequence parallel 2, micro-batches of 70 tokens", world=2, max_tokens=35, shared_by=2),
    Way(name="sequence parallel 2, gradient checkpointing", world=2, shared_by=2, checkpointing=True),
    Way(name="shared prompts", share_prompts=True),
    Way(name="shared prompts, micro-batches of 3 rows", share_prompts=True, rows=3),
    Way(name="shared prompts, micro-batches of 150 tokens", share_prompts=True, max_tokens=150),
    Way(
        name="shared prompts, gradient checkpointing and offload", share_prompts=True, checkpointing=True, offload=True
    ),
    Way(name="shared prompts, 2 ranks", share_prompts=True, world=2),
    Way(name="shared prompts, 2 ranks, micro-batches of 3 rows", share_prompts=True, world=2, rows=3),
    Way(name="shared prompts, 2 ranks, micro-batches of 70 tokens", share_prompts=True, world=2, max_tokens=70),
    Way(name="shared prompts, sequence parallel 2", share_prompts=True, world=2, shared_by=2),
)
MERGED = Way(name="LoRA merged into the weights", adapter="merged")
BESIDE = Way(name="LoRA beside the weights", adapter="beside", compared_with=MERGED.name)
ADAPTERS = (
    BESIDE,
    Way(name="LoRA beside the weights, micro-batches of 1 row", rows=1, adapter="beside", compared_with=BESIDE.name),
    Way(
        name="LoRA beside the weights, shared prompts", share_prompts=True, adapter="beside", compared_with=BESIDE.name
    ),
    Way(name="LoRA beside the weights, 2 ranks", world=2, adapter="beside", compared_with=BESIDE.name),
)
GROUPS = (
    Way(name="2 groups of 2 ranks that share sequences", world=4, shared_by=2),
    Way(name="2 groups of 2 ranks, one without a row", world=4, first_rank=0, shared_by=2),
    Way(name="4 ranks, hybrid sharding (fsdp_size 2)", world=4, fsdp_size=2),
)
FIVE = Way(name="5 rows", first_rows=5, mode="seq-mean-token-mean")
FEW = (  # compared with FIVE: an even cut gives one of the ranks 2 rows and the others 1
    Way(name="5 rows on 4 ranks", world=4, first_rows=5, mode="seq-mean-token-mean", compared_with=FIVE.name),
)
Measured = Mapping[str, dict[str, Any]]


def run_ways(
    folders: Mapping[str, Path], world: int, ways: Sequence[Way], out: Path
) -> dict[str, dict[str, dict[str, Any]]]:
    """Run the ways of one world size in processes of their own; return what rank 0 found, by kind of model and way."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    places = {kind: str(folder) for kind, folder in folders.items()}
    argument = json.dumps({"folders": places, "ways": [asdict(way) for way in ways], "out": str(out)})
    shared = os.environ | {"WORLD_SIZE": str(world), "MASTER_PORT": str(port), "PYTHONPATH": str(HERE.parents[1])}
    script = [sys.executable, str(HERE / "learner_process.py"), argument]
    processes = [subprocess.Popen(script, env=shared | {"RANK": str(rank)}) for rank in range(world)]
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world
    names = [way.name for way in ways]
    return {kind: dict(zip(names, found, strict=True)) for kind, found in json.loads(out.read_text()).items()}


def deviations(way: Way, measured: Measured) -> dict[str, float]:
    """Return the deviation of each figure: relative for losses and norms, the largest of any token for the others.

    The weights' gradients are not those of an adapter beside them, so such norms are left out.
    """
    whole, found = measured[way.compared_with], measured[way.name]
    scalars = [name for name in SCALARS if way.compared_with != MERGED.name or "norm" not in name]
    out = {name: abs(found[name] - whole[name]) / abs(whole[name]) for name in scalars}
    for name in PER_TOKEN:
        here, there = (torch.tensor(run[name], dtype=torch.float64) for run in (found, whole))
        assert here.shape == there.shape, name
        out[name] = float((here - there).abs().max())
    return out


def table(kinds: Mapping[str, Measured]) -> str:
    """Return the page of docs/results."""
    lines = [_HEAD]
    for kind, measured in kinds.items():
        lines.append(f"\n## {_TITLES[kind]}\n")
        lines.append(
            "| way | policy loss | KL | grad norm | value loss | its grad norm | log-probs | entropy | values |"
        )
        lines.append("|---|" + "---|" * (len(SCALARS) + len(PER_TOKEN)))
        for way in (*WAYS, *GROUPS, *FEW, *ADAPTERS):
            if way.name in measured:
                apart = deviations(way, measured)
                figures = (f"{apart[key]:.0e}" if key in apart else "-" for key in (*SCALARS, *PER_TOKEN))
                lines.append(f"| {way.name} | " + " | ".join(figures) + " |")
    return "\n".join(lines) + "\n"


_TITLES = {"qwen2": "Text model (Qwen2)", "qwen2_5_vl": "Qwen2.5-VL, rows with 0 to 3 images mixed"}
_HEAD = """# The same numbers, however a batch is cut

One update of actor and critic on the same rows, in float32, against the rows packed into one micro-batch on one rank.
An adapter beside the weights is compared with the same merged into them, and cut in other ways with itself; 5 rows on 4
ranks are compared with 5 rows on one.
Losses and gradient norms: relative deviation. Log-probs, entropy (nats) and values: the largest deviation of any token.
Offload on a CPU takes the same path but moves nothing, since there is one memory. Bound: 1e-5. Made by

```bash
VRL_WRITE_TABLES=1 .venv/bin/python -m pytest tests/workers/test_learner.py
```"""
