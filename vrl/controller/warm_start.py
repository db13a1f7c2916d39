"""Supervised steps before RL, through the actor's own learner; the result is a model folder cached by content.

Called by `vrl train` when `warm_start.enable` is set, and by `vrl sft`.

With LoRA, the warm start of `vrl train` trains all weights, since it makes the base of the adapter. `vrl sft` trains
the adapter; its folder has the merged weights and the adapter beside them.

With `warm_start.stop_probability` the mean probability of the answers of a few rows of each data source is looked at
before every step. A source that has reached it gives no more rows until it falls below again; when all have, the warm
start ends. So RL begins at the same level whatever the seed, and no task is taught out while another is behind.
"""

import hashlib
import importlib.metadata
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import final

import vrl
from vrl.controller.lessons import Lessons
from vrl.controller.pools import Pools
from vrl.controller.progress import stage
from vrl.controller.resource_pool import PoolSpec
from vrl.controller.roles import Actor
from vrl.data.dataset import RowDataset, load_rows
from vrl.data.loader import PromptLoader
from vrl.models.renderer import load_renderer
from vrl.protocol.columns import OLD_LOG_PROBS
from vrl.protocol.config.model import OptimConfig
from vrl.protocol.config.schema import Config
from vrl.protocol.errors import DataError
from vrl.protocol.trajectory import Prompt
from vrl.workers.host import RunLength

_LOG = logging.getLogger(__name__)
# A change in any of these may change what a warm start gives.
_SOURCES = (
    *("agent", "algorithms", "data", "models", "protocol", "workers"),
    *(f"controller/{name}.py" for name in ("lessons", "playback", "warm_start")),
)
_PACKAGES = ("torch", "transformers")
_PROBE_ROWS = 64  # of each data source, to see how probable its answers are


def warm_started(
    config: Config, pool: PoolSpec, left_out: frozenset[str] = frozenset(), *, through_adapter: bool = False
) -> Config:
    """Return the settings with the model replaced by its warm-started copy, made now if the cache lacks it.

    Rows of the environments in `left_out` are not learned. With `through_adapter` the settings of LoRA hold; else all
    weights learn.
    """
    if not config.warm_start.enable:
        return config
    trained = config if through_adapter else _all_weights(config)
    folder = Path(config.warm_start.cache_dir) / content_hash(trained, pool.world_size, left_out)
    if folder.is_dir():
        _LOG.info("warm start: found in the cache, %s", folder)
    else:
        _make(trained, pool, folder, left_out)
    model = replace(config.actor_rollout_ref.model, path=str(folder), tokenizer_path=None)
    return replace(config, actor_rollout_ref=replace(config.actor_rollout_ref, model=model))


def _all_weights(config: Config) -> Config:
    policy = config.actor_rollout_ref
    model = replace(policy.model, lora_rank=0, lora_adapter_path=None)
    return replace(config, actor_rollout_ref=replace(policy, model=model))


def content_hash(config: Config, world_size: int, left_out: frozenset[str] = frozenset()) -> str:
    """Return the name of a warm start: a hash of model, data, settings, seed, code and versions."""
    rollout = config.actor_rollout_ref.rollout
    model = config.actor_rollout_ref.model
    digest = hashlib.sha256()
    settings = replace(config.warm_start, cache_dir="")
    digest.update(repr((settings, model.override_config, model.min_pixels, model.max_pixels)).encode())
    digest.update(repr((config.trainer.seed, world_size, config.actor_rollout_ref.actor.optim.betas)).encode())
    digest.update(repr([importlib.metadata.version(name) for name in _PACKAGES]).encode())
    if model.uses_lora:
        shape = (model.lora_rank, model.lora_alpha, model.target_modules, model.exclude_modules)
        digest.update(repr(shape).encode())
    if rollout.agent.environments or left_out:
        digest.update(repr((rollout.agent, rollout.multi_turn, sorted(left_out))).encode())
    package = Path(vrl.__file__).parent
    paths = [Path(name) for name in config.warm_start.files]
    paths += sorted(path for path in Path(model.path).glob("*") if path.is_file())
    for source in _SOURCES:
        paths += sorted((package / source).rglob("*.py")) if (package / source).is_dir() else [package / source]
    for path in paths:
        if not path.is_file():
            raise DataError(f"warm_start.files: {path} does not exist")
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _make(config: Config, spec: PoolSpec, folder: Path, left_out: frozenset[str]) -> None:
    settings = config.warm_start
    model = config.actor_rollout_ref.model
    optim = OptimConfig(lr=settings.lr, lr_warmup_steps=settings.lr_warmup_steps, weight_decay=0.0)
    policy = config.actor_rollout_ref
    trained = replace(config, actor_rollout_ref=replace(policy, actor=replace(policy.actor, optim=optim)))
    renderer = load_renderer(config.tokenizer_path, model.min_pixels, model.max_pixels)
    rows = load_rows(settings.files, left_out=left_out)
    lessons = Lessons(config, renderer)
    processes = Pools([spec], trained)
    try:
        actor = Actor(processes.build(["actor"], RunLength(actor=settings.steps, critic=1), trained)["actor"])
        steps, loss = _learn(config, actor, rows, lessons)
        part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
        actor.export(part)
    finally:
        lessons.close()
        processes.close()
    if folder.is_dir():  # another run made the same one meanwhile
        shutil.rmtree(part)
    else:
        part.rename(folder)
    _LOG.info("warm start: %d steps, last loss %.3f, saved to %s", steps, loss, folder)


def _learn(config: Config, actor: Actor, rows: RowDataset, lessons: Lessons) -> tuple[int, float]:
    """Take the steps; return how many there were and the last one's loss."""
    settings = config.warm_start
    loader = PromptLoader(rows, settings.batch_size, seed=config.trainer.seed)
    probe = None
    if settings.stop_probability is not None:
        probe = _Probe(rows, lessons, settings.stop_probability)
    taken, loss = 0, math.nan
    with stage("warm start", settings.steps) as progress:
        for prompts in _what_is_behind(loader, actor, probe, settings.steps):
            loss = actor.update_supervised(lessons.batch(prompts))["train/loss"]
            taken += 1
            progress.advance(1, f"loss {loss:.3f} {probe.note if probe is not None else ''}")
    if probe is not None:
        _LOG.info("warm start: mean probability of the answers: %s", probe.note)
        if probe.lagging:
            _LOG.warning(
                "warm start: %d steps did not bring all answers to a probability of %s; raise warm_start.steps or lr",
                settings.steps,
                settings.stop_probability,
            )
    return taken, loss


def _what_is_behind(loader: PromptLoader, actor: Actor, probe: "_Probe | None", limit: int) -> Iterator[list[Prompt]]:
    """Yield what to learn in each step, from the data sources that are behind."""
    for _ in range(limit):
        prompts = loader.next_batch()
        if probe is not None:
            probe.look(actor)
            prompts = [prompt for prompt in prompts if prompt.data_source in probe.lagging]
            if not probe.lagging:
                return
        if prompts:  # a small batch may have no row of the sources that are behind
            yield prompts


@final
class _Probe:
    """Some rows of each data source, the first of the files, and which sources' answers are not probable enough."""

    def __init__(self, rows: RowDataset, lessons: Lessons, wanted: float) -> None:
        chosen: list[Prompt] = []
        count: Counter[str] = Counter()
        for index in range(len(rows)):
            prompt = rows[index]
            count[prompt.data_source] += 1
            if count[prompt.data_source] <= _PROBE_ROWS:
                chosen.append(prompt)
        self._sources = [prompt.data_source for prompt in chosen]
        self._batch = lessons.batch(chosen)
        self._wanted = wanted
        self.lagging = set(self._sources)
        self.note = ""  # for people

    def look(self, actor: Actor) -> None:
        """Measure the mean probability of a whole answer in each data source."""
        rows = actor.log_probs(self._batch).ragged(OLD_LOG_PROBS).to_rows()
        found: dict[str, list[float]] = {}
        for source, row in zip(self._sources, rows, strict=True):  # 0 outside the answer
            found.setdefault(source, []).append(math.exp(float(row.double().sum())))
        means = {source: sum(values) / len(values) for source, values in sorted(found.items())}
        self.lagging = {source for source, mean in means.items() if mean < self._wanted}
        self.note = ", ".join(f"{source} {mean:.2f}" for source, mean in means.items())
