"""Ratios of the learner against plain PyTorch, in one run: `python benchmarks/training.py [ROUNDS] [PART ...]`.

Parts (each in processes of its own, one thread each): `packed` (packed against padded training, and against a bare
loop on the same packed tokens), `log_probs` (peak memory of chunked against plain log-probs; some minutes), `sequence`
(activation memory a rank under sequence parallelism), `advantages` (estimators on ragged rows against plain padded
formulas). Times are CPU seconds, in turn, as median with quartiles: other jobs on the machine move them little.
"""

import argparse
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageParams, get_advantage
from vrl.algorithms.losses.registry import LossParams, get_policy_loss
from vrl.models import backbone
from vrl.models.loading import load_policy
from vrl.models.packing import PackedBatch, pack
from vrl.models.policy import CausalPolicy
from vrl.models.token_log_probs import Extra, token_log_probs
from vrl.models.ulysses import SequenceGroup
from vrl.protocol.columns import ADVANTAGES, INPUT_IDS, LOSS_MASK, OLD_LOG_PROBS, ROLLOUT_LOG_PROBS, TURN_IDS
from vrl.protocol.config.model import OptimConfig
from vrl.protocol.dataproto import DataProto
from vrl.protocol.ragged import Ragged
from vrl.workers import process
from vrl.workers.building import stepper
from vrl.workers.learner import BatchLimits, Learner
from vrl.workers.losses import PolicyObjective, SamplingDistribution
from vrl.workers.microbatch import Packer
from vrl.workers.process import RankPlace, fsdp_mesh
from vrl.workers.sharding import shard

VOCABULARY, LONGEST, ROWS = 8192, 1024, 24
PARTS = ("packed", "log_probs", "sequence", "advantages")
OPTIM = OptimConfig(lr=1e-5, lr_warmup_steps=0)


def spread(values: Sequence[float], unit: str = "") -> str:
    """Return median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f}{unit} ({low:.2f} to {high:.2f})"


def model_folder(root: Path, hidden: int = 256) -> Path:
    """Write a text model of about 7 million parameters with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=32768, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(root)
    return root


def rows_of(lengths: Sequence[int], prompts: Sequence[int] = ()) -> DataProto:
    """Return rows of such lengths, with prompts of such lengths or of a quarter of them."""
    draw = torch.Generator().manual_seed(1)
    ids = Ragged.from_rows([torch.randint(0, VOCABULARY, (n,), generator=draw).tolist() for n in lengths], torch.int64)
    prompts = prompts or [n // 4 for n in lengths]
    masks = [[k >= prompt for k in range(n)] for n, prompt in zip(lengths, prompts, strict=True)]
    noise = [torch.randn(len(ids.values), generator=draw) for _ in range(3)]
    return DataProto(
        {
            INPUT_IDS: ids,
            LOSS_MASK: Ragged.from_rows(masks, torch.bool),
            TURN_IDS: Ragged.from_rows([[int(k) - 1 for k in mask] for mask in masks], torch.int32),
            ADVANTAGES: Ragged(noise[0], ids.offsets),
            OLD_LOG_PROBS: Ragged(0.1 * noise[1] - 9.0, ids.offsets),
            ROLLOUT_LOG_PROBS: Ragged(0.1 * noise[2] - 9.0, ids.offsets),
        }
    )


def long_tailed(rows: int) -> list[int]:
    """Return lengths with a mean of about a quarter of the longest."""
    draw = torch.empty(rows).exponential_(1.0, generator=torch.Generator().manual_seed(2))
    lengths = (draw * LONGEST / 5).clamp(16, LONGEST).long().tolist()
    return [*lengths[:-1], LONGEST]


def ppo(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return the clipped loss as a person writes it."""
    ratio = (log_probs - old).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    return (loss * mask).sum() / mask.sum()


class PaddedLoop:
    """Transformers' forward on right-padded rows, all logits at once."""

    def __init__(self, folder: Path, rows: DataProto) -> None:
        self.model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=OPTIM.lr, fused=True)
        self.columns = [_padded(rows.ragged(name)) for name in (INPUT_IDS, OLD_LOG_PROBS, ADVANTAGES, LOSS_MASK)]
        lengths = rows.ragged(INPUT_IDS).lengths
        self.attention = (torch.arange(int(lengths.max()))[None] < lengths[:, None]).long()

    def step(self) -> None:
        """Forward, backward, clip, step."""
        ids, old, advantages, mask = self.columns
        logits = self.model(input_ids=ids, attention_mask=self.attention, use_cache=False).logits[:, :-1]
        log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ppo(log_probs, old[:, 1:], advantages[:, 1:], mask[:, 1:]).backward()
        _finish(self.model, self.optimizer)


class BareLoop:
    """The same packed tokens and attention, without sharding, chunks, metrics or micro-batches."""

    def __init__(self, folder: Path, rows: DataProto) -> None:
        self.policy = load_policy(folder, torch.float32, gradient_checkpointing=False)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=OPTIM.lr, fused=True)
        self.packed = Packer(None, needs_positions=False).pack(rows, torch.device("cpu"))
        self.columns = [rows.ragged(name).values[1:] for name in (OLD_LOG_PROBS, ADVANTAGES, LOSS_MASK)]

    def step(self) -> None:
        """Forward, backward, clip, step."""
        head: Any = self.policy.hf.get_output_embeddings()
        logits = head(backbone.hidden_states(self.policy.hf.base_model, self.packed)[:-1])
        log_probs = logits.log_softmax(-1).gather(-1, self.packed.input_ids[1:, None])[:, 0]
        ppo(log_probs, *self.columns).backward()
        _finish(self.policy, self.optimizer)


def _padded(column: Ragged) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(column.to_rows(), batch_first=True)


def _finish(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def learner_of(folder: Path) -> Learner:
    """Return the learner that a run has, on one rank."""
    policy = load_policy(folder, torch.float32, gradient_checkpointing=False)
    blocks = [*policy.vision_blocks(), *policy.decoder_layers()]
    shard(policy, blocks, fsdp_mesh("cpu", -1), torch.float32, reshard=True)
    step = stepper(policy, OPTIM, 1.0, 1000)
    return Learner(policy, Packer(None, needs_positions=False), BatchLimits(max_tokens=8192), step)


def objective() -> PolicyObjective:
    """Return the clipped loss with nothing beside it."""
    sampling = SamplingDistribution(temperature=1.0, banned_ids=(), chunk_tokens=1024)
    return PolicyObjective(
        loss=get_policy_loss("vanilla"), params=LossParams(), sampling=sampling, mode="token-mean", norm_length=None,
        entropy_coeff=0.0, kl_coef=None, kl_type="low_var_kl",
    )  # fmt: skip


def compare(rounds: int, **runs: Callable[[], object]) -> dict[str, list[float]]:
    """Return CPU seconds of each run by round, taken in turn after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            if number:
                seconds[name].append(time.process_time() - begin)
    return seconds


def ratio(over: Sequence[float], under: Sequence[float]) -> str:
    """Return the ratio round by round."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def part_packed(rounds: int) -> None:
    """Train on long-tailed rows: our learner, a bare loop on the packed rows, transformers on padded rows."""
    place(0, 1, free_port())
    with tempfile.TemporaryDirectory() as root:
        folder = model_folder(Path(root))
        rows = rows_of(long_tailed(ROWS))
        ours, loss = learner_of(folder), objective()
        bare, padded = BareLoop(folder, rows), PaddedLoop(folder, rows)
        members = [list(range(len(rows)))]
        seconds = compare(rounds, ours=lambda: ours.update(rows, members, loss), bare=bare.step, padded=padded.step)
    lengths = rows.ragged(INPUT_IDS).lengths
    print(f"rows: {len(rows)}, mean length {float(lengths.double().mean()):.0f}, longest {int(lengths.max())}")
    print(f"packed / padded training throughput: {ratio(seconds['padded'], seconds['ours'])} (3 or more is wanted)")
    print(f"learner / bare loop throughput: {ratio(seconds['bare'], seconds['ours'])} (0.9 or more is wanted)")
    process.stop()


def peak_log_probs(kind: str, tokens: int, vocabulary: int, width: int, chunk: int) -> None:
    """Print the peak memory in MiB that log-probs with their gradients take beyond their inputs."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw).requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, width, generator=draw)).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=draw)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "chunked":
        found = token_log_probs(hidden, (weight, None), targets, want=Extra.ENTROPY, chunk_tokens=chunk)
        log_probs, entropy = found.log_probs, found.entropy
    else:
        logs = (hidden @ weight.T).log_softmax(-1)
        log_probs, entropy = logs.gather(-1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    assert entropy is not None
    (log_probs.sum() + 0.1 * entropy.sum()).backward()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10)


def part_log_probs(_rounds: int) -> None:
    """Compare peaks at a size that the plain way can take; then the chunked one with its bound at 32k x 150k."""
    small = ("4096", "32000", "256", "512")
    plain, chunked = (float(own_process("peak", kind, *small)[-1]) for kind in ("plain", "chunked"))
    print(f"chunked / plain log-probs, 4096 tokens, 32000 words: peak {chunked:.0f} / {plain:.0f} MiB = "
          f"{chunked / plain:.2f}")  # fmt: skip
    tokens, words, width, chunk = 32768, 150_000, 64, 512
    peak = float(own_process("peak", "chunked", str(tokens), str(words), str(width), str(chunk))[-1])
    bound = (2 * tokens * width + 3 * chunk * words + words * width) * 4 / 2**20
    print(f"chunked log-probs, 32k tokens, 150k words: peak {peak:.0f} MiB; 2 x hidden + 3 chunks + head's gradient: "
          f"{bound:.0f} MiB")  # fmt: skip


def saved_bytes(policy: CausalPolicy, packed: PackedBatch) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, parameters apart; runs both."""
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        where = tensor.untyped_storage().data_ptr()
        if where not in own:
            kept[where] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = policy(packed, chunk_tokens=512)
        total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        kept.clear()
        outputs.log_probs.sum().backward()
    return total


def sequence_rank(rank: int, world: int, port: int, root: str) -> None:
    """Print rank 0's activation bytes for two long rows."""
    place(rank, world, port)
    policy = load_policy(Path(root), torch.float32, gradient_checkpointing=False)
    lengths = [6000, 2192]
    ids = torch.randint(0, VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    sequence = SequenceGroup(dist.group.WORLD) if world > 1 else None  # pyright: ignore[reportArgumentType]
    found = saved_bytes(policy, pack(ids, offsets, sequence=sequence))
    if rank == 0:
        print(found)
    process.stop()


def part_sequence(_rounds: int) -> None:
    """Compare what a rank keeps for the backward pass with one rank and with two that share the sequence."""
    with tempfile.TemporaryDirectory() as root:
        model_folder(Path(root))
        kept = {}
        for world in (1, 2):
            port = str(free_port())
            ranks = [started("rank", str(rank), str(world), port, root) for rank in range(world)]
            printed = [rank.communicate()[0] for rank in ranks]
            kept[world] = float(printed[0].split()[-1])
            assert all(rank.returncode == 0 for rank in ranks)
    print(f"sequence parallel 2 / 1, 8192 tokens: activations a rank {kept[2] / 2**20:.0f} / {kept[1] / 2**20:.0f} MiB "
          f"= {kept[2] / kept[1]:.2f} (0.6 or less is wanted)")  # fmt: skip


def plain_gae(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """GAE over padded columns from the last to the first, whitened over the mask."""
    last = torch.zeros(len(rewards))
    after = torch.zeros(len(rewards))
    advantages = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + after - values[:, t]
        last = torch.where(mask[:, t], delta + 0.95 * last, last)
        after = torch.where(mask[:, t], values[:, t], after)
        advantages.append(last)
    stacked = torch.stack(advantages[::-1], 1)
    chosen = stacked[mask]
    return (stacked - chosen.mean()) / (chosen.std() + 1e-8) * mask


def plain_grpo(rewards: Tensor, group: Tensor, mask: Tensor, leave_one_out: bool) -> Tensor:
    """Group by group, as in published trainers: score minus the mean, over the deviation or the others only."""
    scores = rewards.sum(-1)
    out = torch.zeros_like(scores)
    for number in group.unique():
        where = group == number
        mine = scores[where]
        if leave_one_out:
            out[where] = (mine - mine.mean()) * len(mine) / (len(mine) - 1)
        else:
            out[where] = (mine - mine.mean()) / (mine.std() + 1e-6)
    return out[:, None] * mask


def part_advantages(rounds: int) -> None:
    """Time estimators on 1024 rows of 2048 tokens, of which the last three quarters were sampled."""
    rows, width = 1024, 2048
    draw = torch.Generator().manual_seed(0)
    mask = (torch.arange(width) >= width // 4).expand(rows, width)
    rewards = torch.zeros(rows, width)
    rewards[:, -1] = torch.randn(rows, generator=draw)
    values = torch.randn(rows, width, generator=draw)
    group = torch.arange(rows) // 8
    inputs = AdvantageInputs(
        token_level_rewards=rewards.reshape(-1), mask=mask.reshape(-1), group=group,
        offsets=torch.arange(rows + 1) * width, values=values.reshape(-1),
    )  # fmt: skip
    params = AdvantageParams(gamma=1.0, lam=0.95)
    plain = {
        "gae": lambda: plain_gae(rewards, values, mask),
        "grpo": lambda: plain_grpo(rewards, group, mask, leave_one_out=False),
        "rloo": lambda: plain_grpo(rewards, group, mask, leave_one_out=True),
    }
    for name, formula in plain.items():
        estimator = get_advantage(name)
        found = estimator(inputs, params).advantages.view(rows, width)
        assert torch.allclose(found, formula(), atol=2e-3), name
        seconds = compare(rounds, ours=lambda e=estimator: e(inputs, params), plain=formula)
        middle = [1000 * statistics.median(seconds[key]) for key in ("ours", "plain")]
        print(f"{name}: plain padded / ours = {ratio(seconds['plain'], seconds['ours'])}, "
              f"{middle[1]:.1f} / {middle[0]:.1f} ms")  # fmt: skip


def place(rank: int, world: int, port: int) -> None:
    """Join the process group with one thread."""
    process.start(
        RankPlace(
            rank=rank,
            world_size=world,
            local_rank=rank,
            local_world_size=world,
            master_address="127.0.0.1",
            master_port=port,
            device="cpu",
        )
    )


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def started(*arguments: str) -> "subprocess.Popen[str]":
    """Start this file again for one of its inner parts."""
    environment = {**os.environ, **process.environment("cpu", 1)}
    command = [sys.executable, __file__, "--inner", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def own_process(*arguments: str) -> list[str]:
    """Return the words that an inner part prints."""
    inner = started(*arguments)
    printed = inner.communicate()[0]
    assert inner.returncode == 0, arguments
    return printed.split()


def main() -> None:
    """Run the parts that were asked for."""
    if sys.argv[1:2] == ["--inner"]:
        torch.set_num_threads(1)
        kind, *given = sys.argv[2:]
        if kind == "peak":
            peak_log_probs(given[0], *map(int, given[1:]))
        elif kind == "rank":
            sequence_rank(int(given[0]), int(given[1]), int(given[2]), given[3])
        else:
            {"packed": part_packed, "advantages": part_advantages}[kind](int(given[0]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rounds", nargs="?", type=int, default=12)
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)}; all by default")
    asked = parser.parse_args()
    for part in asked.parts or PARTS:
        print(f"\n== {part}", flush=True)
        if part in ("packed", "advantages"):
            print(started(part, str(asked.rounds)).communicate()[0], end="")
        else:
            {"log_probs": part_log_probs, "sequence": part_sequence}[part](asked.rounds)


if __name__ == "__main__":
    main()
