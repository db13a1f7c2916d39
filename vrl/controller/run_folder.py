"""The folder of a run: where everything lies, its log, its checkpoints. Opened once by the command line.

config.yaml  metrics.jsonl  log.txt  latest_checkpointed_iteration.txt
rollouts/step_N.jsonl  validation/step_N.jsonl  checkpoints/global_step_N/  tensorboard/  wandb/
evaluations/  each of `vrl eval`, which only reads the rest, in such a folder of its own
"""

import fcntl
import logging
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TextIO, final

from vrl.controller.checkpoint_folders import CheckpointFolders, read, write_whole
from vrl.controller.metrics_file import set_aside
from vrl.controller.progress import write_line
from vrl.protocol.errors import ConfigError

_LOG = logging.getLogger(__name__)
_CHECKPOINTS = "checkpoints"
_FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@final
class RunFolder:
    """An open run folder. Use `open`; `close`, or leaving the `with` block, gives it back to other processes."""

    def __init__(self, path: Path, lock: TextIO, log: "RunLog") -> None:
        self.path = path
        self._lock = lock
        self._log = log
        self._checkpoints = checkpoints_of(path)

    @classmethod
    def open(cls, path: Path, config_text: str) -> "RunFolder":
        """Make the folder or go on with it, start its log, and clear up what a killed run left half-written.

        `config_text` becomes `config.yaml`; another one that lies there is set aside under a number. Raises
        ConfigError when a run in another process has the folder open, or when it cannot be written.
        """
        path = path.resolve()
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = (path / ".lock").open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"run folder {path} cannot be written ({error}); set trainer.default_local_dir to another"
            ) from error
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise ConfigError(
                f"another run has {path} open; wait for it, or set trainer.experiment_name to another name"
            ) from error
        folder = cls(path, lock, RunLog(path / "log.txt"))
        folder._write_config(config_text)
        folder._checkpoints.recover()
        return folder

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the log and let other processes open the folder."""
        self._log.close()
        self._lock.close()

    @property
    def config(self) -> Path:
        """The settings with every key, as YAML."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """Folder of the readable rollouts."""
        return self.path / "rollouts"

    @property
    def validation(self) -> Path:
        """Folder of the readable evaluations."""
        return self.path / "validation"

    @property
    def checkpoints(self) -> Path:
        """Folder of `global_step_N`."""
        return self.path / _CHECKPOINTS

    @property
    def tensorboard(self) -> Path:
        """Folder of tensorboard's event files."""
        return self.path / "tensorboard"

    def latest_checkpoint(self) -> Path | None:
        """Return the complete checkpoint that was written last."""
        return self._checkpoints.latest()

    def new_checkpoint(self, step: int, max_keep: int | None) -> AbstractContextManager[Path]:
        """Yield a folder to fill; it becomes the checkpoint of `step` when the block ends without an error."""
        return self._checkpoints.writing(step, max_keep)

    def finished(self, total_steps: int | None) -> bool:
        """Whether the last step's checkpoint is there. Without a number of steps nobody knows yet: False."""
        newest = self.latest_checkpoint()
        found = read(newest) if newest is not None else None
        return total_steps is not None and found is not None and found.step >= total_steps

    def _write_config(self, text: str) -> None:
        if self.config.exists() and self.config.read_text(encoding="utf-8") != text:
            set_aside(self.config)
        write_whole(self.config, text)


def checkpoints_of(run: Path) -> CheckpointFolders:
    """Return the checkpoints of a run folder, also of one that nobody or another process has open."""
    return CheckpointFolders(run / _CHECKPOINTS, run / "latest_checkpointed_iteration.txt")


@final
class RunLog:
    """Sends what is logged to a file, and warnings to the console too, until it is closed.

    vrl's own messages are kept from INFO on, those of other packages from WARNING on.
    """

    def __init__(self, path: Path) -> None:
        file = logging.FileHandler(path, encoding="utf-8")
        file.setFormatter(logging.Formatter(_FILE_FORMAT))
        self._handlers: list[logging.Handler] = [file, ConsoleWarnings()]
        for handler in self._handlers:
            logging.getLogger().addHandler(handler)
        logging.getLogger("vrl").setLevel(logging.INFO)
        logging.captureWarnings(True)

    def close(self) -> None:
        """Take the handlers off again."""
        for handler in self._handlers:
            logging.getLogger().removeHandler(handler)
            handler.close()
        logging.getLogger("vrl").setLevel(logging.NOTSET)
        logging.captureWarnings(False)


@final
class ConsoleWarnings(logging.Handler):
    """Warnings as lines on the standard error stream, above a bar that may be there."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line. A console that is gone stops nothing."""
        try:
            write_line(self.format(record), sys.stderr)
        except (OSError, ValueError):
            self.handleError(record)
