"""Makes the model folder and the data files of a run when they are missing and `prepare.*` names how."""

import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from vrl.data.tiny_agent_tasks import agent_texts, write_tiny_agent_data
from vrl.data.tiny_tasks import tokenizer_texts, write_tiny_data
from vrl.models.tiny import build_tiny_model
from vrl.protocol.config.schema import Config
from vrl.protocol.errors import ConfigError

_LOG = logging.getLogger(__name__)
_DATA_FILES: Final = ("warm_start.parquet", "train.parquet", "val.parquet")  # of every recipe


def prepare(config: Config) -> None:
    """Build what is missing. Raises ConfigError for an unknown recipe."""
    model = Path(config.actor_rollout_ref.model.path)
    if config.prepare.model is not None and not model.exists():
        _LOG.info("making %s (%s)", model, config.prepare.model)
        build_model(config.prepare.model, model, config.prepare.seed)
    files = [*config.data.train_files, *config.data.val_files, *config.warm_start.files]
    missing = [Path(name) for name in files if not Path(name).exists()]
    # Another name is a person's own file, mistyped: it is missed when the data are read.
    if config.prepare.data is not None and missing and all(path.name in _DATA_FILES for path in missing):
        _write_missing(config.prepare.data, missing, config.prepare.seed)


def _write_missing(recipe: str, missing: Sequence[Path], seed: int) -> None:
    """Put files of the recipe where they are missed; what else stands in their folders may be a person's own."""
    _LOG.info("writing %s (%s)", ", ".join(map(str, missing)), recipe)
    with tempfile.TemporaryDirectory() as part:
        write_data(recipe, Path(part), seed)
        for path in missing:
            written = Path(part) / path.name
            if written.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(written, path)


def build_model(recipe: str, folder: Path, seed: int) -> None:
    """Write the model folder, whole or not at all."""
    recipes: Mapping[str, Callable[[Path], object]] = {
        "tiny_qwen2_5_vl": lambda out: build_tiny_model("qwen2_5_vl", out, tokenizer_texts(), seed),
        "tiny_qwen2": lambda out: build_tiny_model("qwen2", out, tokenizer_texts(), seed),
        "tiny_agent": lambda out: build_tiny_model("qwen2_5_vl", out, [*tokenizer_texts(), *agent_texts()], seed),
        "smollm2": _smollm2,
    }
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    _chosen(recipes, recipe, "prepare.model")(part)
    part.rename(folder)


def write_data(recipe: str, folder: Path, seed: int) -> None:
    """Write the data files into a folder."""
    recipes: Mapping[str, Callable[[Path], object]] = {
        "tiny": lambda out: write_tiny_data(out, seed),
        "tiny_agent": lambda out: write_tiny_agent_data(out, seed),
        "reasoning_gym": lambda out: _reasoning_gym(out, seed),
    }
    _chosen(recipes, recipe, "prepare.data")(folder)


def _smollm2(folder: Path) -> None:
    from vrl.models.smollm2 import build_smollm2  # noqa: PLC0415  (only this recipe needs the GGUF reader)

    build_smollm2(folder)


def _reasoning_gym(folder: Path, seed: int) -> None:
    with warnings.catch_warnings():  # of a package it uses, when Python compiles it: nothing a person here can act on
        warnings.simplefilter("ignore", SyntaxWarning)
        from vrl.data.reasoning_gym_tasks import write_reasoning_gym_data  # noqa: PLC0415  (takes seconds to import)

    write_reasoning_gym_data(folder, seed)


def _chosen(recipes: Mapping[str, Callable[[Path], object]], name: str, key: str) -> Callable[[Path], object]:
    if name not in recipes:
        raise ConfigError(f"{key}={name!r} is unknown; there are {', '.join(sorted(recipes))}")
    return recipes[name]
