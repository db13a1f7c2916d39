"""What a run reports, to everywhere it is reported. The only file that knows wandb.

The trainer logs a step, then under the same number its evaluation and its checkpoint, each when it is done.

`metrics.jsonl` is always written and comes first. The console, tensorboard and wandb are `trainer.logger`.
"""

import contextlib
import logging
import math
import netrc
import os
import random
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final
from urllib.parse import urlsplit

import wandb
from torch.utils.tensorboard.writer import SummaryWriter

from vrl.controller.console import TimeLeft, step_line, validation_lines
from vrl.controller.metrics_file import MetricsFile
from vrl.controller.progress import write_line
from vrl.controller.run_folder import RunFolder
from vrl.protocol.config.builder import to_dict
from vrl.protocol.config.schema import Config

_LOG = logging.getLogger(__name__)

_WANDB_HOST = "https://api.wandb.ai"
_CONNECT_SECONDS = 3.0  # to find out whether there is a network
_INIT_SECONDS = 30.0
_FINISH_SECONDS = 60.0  # for what is not uploaded yet at the end; it stays on disk
_SAMPLE_SEED = 42


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An evaluated episode as text."""

    prompt: str
    response: str
    score: float


class Sink(Protocol):
    """One place where metrics go."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of a step."""
        ...


class SampleSink(Sink, Protocol):
    """A place that shows episodes too."""

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Take some episodes of an evaluation."""
        ...


@final
class Tracker:
    """All loggers of a run. Leaving the `with` block flushes and closes them, after a failure too."""

    def __init__(self, folder: RunFolder, config: Config, *, total_steps: int, resume_step: int = 0) -> None:
        """Open the loggers of a run that ends after `total_steps` and goes on after `resume_step`, 0 for a new one."""
        trainer = config.trainer
        self._samples_shown = trainer.log_val_generations
        self._sample_sinks: list[SampleSink] = []
        with contextlib.ExitStack() as stack:
            self._sinks: list[Sink] = [
                stack.enter_context(contextlib.closing(MetricsFile(folder.metrics, resume_step))),
                ConsoleLines(total_steps, quiet="console" not in trainer.logger),
            ]
            if "tensorboard" in trainer.logger:
                log = TensorboardLog(folder.tensorboard, resume_step)
                self._sample_sinks.append(stack.enter_context(contextlib.closing(log)))
            if "wandb" in trainer.logger:
                name = trainer.experiment_name or folder.path.name
                log = WandbLog(folder.path, trainer.project_name, name, to_dict(config), resume_step)
                self._sample_sinks.append(stack.enter_context(contextlib.closing(log)))
            self._closing = stack.pop_all()  # nothing failed: they stay open

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Report metrics of a step, 0 being the state before the first. More of the same step join them."""
        for sink in (*self._sinks, *self._sample_sinks):
            sink.log(metrics, step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Show `trainer.log_val_generations` of an evaluation's samples in tensorboard and wandb.

        Which ones depends on the prompts alone, so that evaluations can be compared.
        """
        ordered = sorted(samples, key=lambda sample: (sample.prompt, sample.response))
        random.Random(_SAMPLE_SEED).shuffle(ordered)
        chosen = ordered[: self._samples_shown]
        for sink in self._sample_sinks if chosen else []:
            sink.log_samples(chosen, step)

    def close(self) -> None:
        """Flush and close all loggers; a second call does nothing."""
        self._closing.close()

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class ConsoleLines:
    """One line a step and one a data source evaluated, to the standard output and the log; quiet: to the log only."""

    def __init__(self, total_steps: int, quiet: bool) -> None:
        self._total_steps = total_steps
        self._quiet = quiet
        self._time_left = TimeLeft(total_steps)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the lines of a step."""
        lines = []
        if "timing_s/step" in metrics:
            left = self._time_left.after(step, metrics["timing_s/step"])
            lines.append(step_line(metrics, step, self._total_steps, left))
        for line in [*lines, *validation_lines(metrics, step)]:
            _LOG.info(line)
            if not self._quiet:
                write_line(line, sys.stdout)


@final
class TensorboardLog:
    """Event files; a resumed run hides the steps that run again."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else None)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write all numbers of a step to disk."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Write episodes as text, in Markdown."""
        for number, sample in enumerate(samples):
            text = f"score {sample.score:g}\n\n{_indented(sample.prompt)}\n\n---\n\n{_indented(sample.response)}"
            self._writer.add_text(f"val/generations/{number}", text, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


@final
class WandbLog:
    """A wandb run, online where there are a key and a network and else offline; `WANDB_MODE` has the last word.

    wandb works in a process of its own and talks to a server: whatever fails there is a warning here.
    """

    def __init__(self, folder: Path, project: str, name: str, config: Mapping[str, Any], resume_step: int) -> None:
        settings: dict[str, Any] = {
            "project": project,
            "name": name,
            "dir": str(folder),
            "config": dict(config),
            "id": _run_id(folder / "wandb_run_id.txt", resume_step),
            "resume": "allow",
        }
        mode = _wandb_mode()
        self._run = _start_wandb(settings, mode)
        if self._run is None and mode != "offline":
            self._run = _start_wandb(settings, "offline")
        if self._run is not None and self._run.offline:
            _LOG.warning("wandb is offline; upload later with `wandb sync %s`", Path(self._run.dir).parent)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand a step over to wandb's process. The first failure ends its use."""
        self._send({name: float(value) for name, value in metrics.items() if math.isfinite(value)}, step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Hand over a table of episodes."""
        table = wandb.Table(["step", "prompt", "response", "score"])
        for sample in samples:
            table.add_data(step, sample.prompt, sample.response, sample.score)
        self._send({"val/generations": table}, step)

    def _send(self, values: Mapping[str, Any], step: int) -> None:
        if self._run is None:
            return
        try:
            self._run.log(dict(values), step=step)
        except Exception as error:  # noqa: BLE001 - the other process may be gone in many ways; the run goes on
            _LOG.warning("wandb is left out from step %d on: %s", step, error)
            self._run = None

    def close(self) -> None:
        """Wait for the upload, not for long."""
        if self._run is None:
            return
        try:
            self._run.finish()
            wandb.teardown()  # waits for its process, which may still be writing the run's file
        except Exception as error:  # noqa: BLE001 - as in `_send`
            _LOG.warning("wandb did not finish: %s", error)
        self._run = None


def _indented(text: str) -> str:
    """Return text as a Markdown block that is shown as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _start_wandb(settings: Mapping[str, Any], mode: str) -> "wandb.Run | None":
    options = wandb.Settings(
        console="off",
        silent=True,
        init_timeout=_INIT_SECONDS,
        login_timeout=_INIT_SECONDS,
        finish_timeout=_FINISH_SECONDS,
    )
    try:
        return wandb.init(**settings, mode=mode, settings=options)  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001 - another process, a server, a network: none may stop a run
        _LOG.warning("wandb does not start in mode %s: %s", mode, error)
        wandb.teardown()  # its process would still hold the run's id
        return None


def _wandb_mode() -> str:
    """Return the mode that is asked for, else online where a key is known and the server answers."""
    asked = os.environ.get("WANDB_MODE")
    if asked:
        return asked
    server = urlsplit(os.environ.get("WANDB_BASE_URL", _WANDB_HOST))
    host = server.hostname or ""
    if not (os.environ.get("WANDB_API_KEY") or _has_login(host)):
        return "offline"
    try:
        socket.create_connection((host, server.port or 443), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return "offline"
    return "online"


def _has_login(host: str) -> bool:
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _run_id(path: Path, resume_step: int) -> str:
    """Return wandb's name of the run: that of the run that is resumed, or a new one."""
    if resume_step and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    name = secrets.token_hex(4)
    path.write_text(f"{name}\n", encoding="utf-8")
    return name
