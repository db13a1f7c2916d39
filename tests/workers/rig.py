"""An actor and an engine over one tiny model in one rank: what the tests of engines, sync and agreement share."""

import io
import math
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from vrl.agent.loop import Unscored
from vrl.agent.sources import FixedSource
from vrl.models.renderer import load_renderer
from vrl.models.tiny import build_tiny_model
from vrl.protocol.columns import ADVANTAGES, INPUT_IDS, LOSS_MASK, OLD_LOG_PROBS, ROLLOUT_LOG_PROBS
from vrl.protocol.config.builder import build
from vrl.protocol.config.schema import Config
from vrl.protocol.dataproto import DataProto
from vrl.protocol.ports import Engine, EngineOutput, EngineRequest
from vrl.protocol.ragged import Ragged
from vrl.protocol.trajectory import Prompt, Sampling
from vrl.workers import process
from vrl.workers.actor import ActorWorker
from vrl.workers.building import BuildContext
from vrl.workers.engines import build_engine
from vrl.workers.process import RankPlace, environment
from vrl.workers.rollout import EngineGroup, RolloutWorker, SideProcesses

TEXTS = ["what is 3 + 4", "the answer is red", "count the blue cells of the grid", "which colour has the cell"]
LONG = "count the cells of the grid, one after the other, and say which of them is red: " * 4  # over a block of 128


def build_tiny(kind: str, root: Path) -> Path:
    """Build a tiny model whose next token varies: small embeddings, so that none just repeats, and a sharp head.

    Logits get a standard deviation of about 2, whatever the builder's own weights are like.
    """
    folder = build_tiny_model(kind, root / kind, TEXTS, seed=5)
    weights = load_file(folder / "model.safetensors")
    embedding = weights[next(name for name in weights if name.endswith("embed_tokens.weight"))]
    embedding *= 0.05 / embedding.std()
    last_norm = weights[next(name for name in weights if name.endswith("model.norm.weight"))]
    last_norm *= 2.0 / (0.05 * math.sqrt(embedding.shape[1]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def png(height: int, width: int, seed: int) -> bytes:
    """Return a PNG of random colours."""
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def prompt(uid: str, content: str, images: Sequence[bytes] = ()) -> Prompt:
    return Prompt(row_id=uid, uid=uid, messages=[{"role": "user", "content": content}], images=tuple(images))


def prompts_of(kind: str) -> list[Prompt]:
    """Return short and long rows; for the vision-language model also rows with one and with two images."""
    text = [prompt("short", "what is 3 + 4?"), prompt("long", LONG)]
    if kind == "qwen2":
        return text
    first, second = png(60, 90, 1), png(84, 56, 2)
    return [
        *text,
        prompt("one", "which colour has <image>", [first]),
        prompt("two", "<image> or <image>? " + LONG, [first, second]),
    ]


def config_of(folder: Path, world: int = 1, response: int = 64, **rollout: Any) -> Config:
    settings = {"kv_cache_gib": 0.25, "max_num_seqs": 32, "limit_images": 2, **rollout}
    actor = {"optim": {"lr": 1e-3, "lr_warmup_steps": 0}}
    return build(
        {
            "actor_rollout_ref": {
                "model": {"path": str(folder), "enable_gradient_checkpointing": False},
                "rollout": settings,
                "actor": actor,
            },
            "data": {"max_prompt_length": 448, "max_response_length": response},
            "trainer": {"n_gpus_per_node": world, "device": "cpu"},
            "algorithm": {"adv_estimator": "grpo"},
        }
    )


def context_of(config: Config) -> BuildContext:
    renderer = load_renderer(config.tokenizer_path)
    images = renderer.image_cache(2**28)
    return BuildContext(config=config, device=torch.device("cpu"), renderer=renderer, images=images)


def drive(engine: Engine, requests: Sequence[EngineRequest], max_steps: int = 500) -> dict[str, EngineOutput]:
    """Add requests and step until all have finished."""
    for request in requests:
        engine.add_request(request)
    outputs: dict[str, EngineOutput] = {}
    for _ in range(max_steps):
        if engine.num_unfinished():
            outputs |= {output.request_id: output for output in engine.step()}
    if engine.num_unfinished():
        raise TimeoutError(f"{engine.num_unfinished()} requests unfinished after {max_steps} steps")
    return outputs


class Difference(NamedTuple):
    """How far trainer and engine are apart on sampled tokens: in probability, and in nats."""

    mean: float
    largest: float
    nats: float


@dataclass(frozen=True)
class Rig:
    """One rank with its roles."""

    context: BuildContext
    actor: ActorWorker
    engine: Engine
    rollout: RolloutWorker
    place: EngineGroup

    @classmethod
    def build(cls, config: Config) -> Self:
        """Build the roles; the process group stands already."""
        torch.manual_seed(0)
        context = context_of(config)
        actor = ActorWorker.build(context, total_steps=100)
        place = EngineGroup.of(config.actor_rollout_ref.rollout.tensor_model_parallel_size)
        engine = build_engine(context, place.replica)
        rollout = RolloutWorker(engine, SideProcesses.start(config, place, Unscored()), context, place)
        return cls(context, actor, engine, rollout, place)

    def actor_at(self, temperature: float) -> ActorWorker:
        """Return another actor with the model's first weights, for rollouts at this temperature."""
        policy = self.context.config.actor_rollout_ref
        changed = replace(policy, rollout=replace(policy.rollout, temperature=temperature))
        config = replace(self.context.config, actor_rollout_ref=changed)
        return ActorWorker.build(replace(self.context, config=config), total_steps=100)

    def request(self, name: str, source: Prompt, sampling: Sampling) -> EngineRequest:
        ids = tuple(self.context.renderer.render(source.messages))
        return EngineRequest(request_id=name, ids=ids, images=source.images, sampling=sampling)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, n: int = 4, step: int = 0) -> DataProto | None:
        """Return the rows of this replica's prompts: every replica takes its own part of them."""
        replicas = self.context.config.num_replicas
        sources = [FixedSource([(p, i) for p in prompts[r::replicas] for i in range(n)]) for r in range(replicas)]
        return self.rollout.generate(sources, sampling, step)

    def difference(self, batch: DataProto, actor: ActorWorker | None = None) -> Difference:
        """Compare the log-probs of the sampled tokens with the trainer's."""
        mask = batch.ragged(LOSS_MASK).values
        trained = (actor or self.actor).log_probs(batch).ragged(OLD_LOG_PROBS).values[mask]
        sampled = batch.ragged(ROLLOUT_LOG_PROBS).values[mask]
        apart = (trained.exp() - sampled.exp()).abs()
        return Difference(float(apart.mean()), float(apart.max()), float((trained - sampled).abs().max()))

    def train(self, batch: DataProto, actor: ActorWorker) -> dict[str, float]:
        """Let an actor take one optimizer step on random advantages."""
        ids = batch.ragged(INPUT_IDS)
        noise = torch.randn(len(ids.values), generator=torch.Generator().manual_seed(3))
        rows = batch.with_columns(**{ADVANTAGES: Ragged(noise, ids.offsets)})
        return actor.update(rows, [list(range(len(rows)))])

    def close(self) -> None:
        self.rollout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def place_of(rank: int, world: int, port: int) -> RankPlace:
    return RankPlace(
        rank=rank,
        world_size=world,
        local_rank=rank,
        local_world_size=world,
        master_address="127.0.0.1",
        master_port=port,
        device="cpu",
    )


@contextmanager
def opened(config: Config) -> Iterator[Rig]:
    """Yield a rig in this process, alone in its group; leave environment, group and engine as they were found."""
    with alone():
        rig = Rig.build(config)
        try:
            yield rig
        finally:
            rig.close()


@contextmanager
def alone() -> Iterator[None]:
    """Make this process a group of one inside the block; leave environment and group as they were found."""
    before = dict(os.environ)
    os.environ.update(environment("cpu", 1))
    process.start(place_of(0, 1, free_port()))
    try:
        yield
    finally:
        process.stop()
        os.environ.clear()
        os.environ.update(before)
