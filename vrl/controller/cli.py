"""The command `vrl`: finds the sub-command and prints what went wrong in one line. Imports nothing heavy by itself."""

import importlib
import os
import sys
from collections.abc import Sequence

from vrl.protocol.errors import ConfigError, DataError

COMMANDS = {
    "train": ("vrl.controller.commands.train", "train with PPO or GRPO; settings as key=value"),
    "sft": ("vrl.controller.commands.sft", "supervised fine-tuning with the same learner"),
    "eval": (
        "vrl.controller.commands.evaluate",
        "evaluate a run's newest checkpoint, or a model, on the held-out files",
    ),
    "model": ("vrl.controller.commands.model", "build a tiny model or SmolLM2"),
    "data": ("vrl.controller.commands.data", "write tiny data, convert gsm8k or geo3k"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command; return the exit code. ConfigError and DataError are for the person, without a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0 if given else 2
    if given[0] not in COMMANDS:
        sys.stderr.write(f"vrl: unknown command {given[0]!r}\n\n{_usage()}")
        return 2
    try:
        # transformers draws a bar for each file it writes; the console is for steps and evaluations.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        module = importlib.import_module(COMMANDS[given[0]][0])
        return int(module.main(given[1:]))
    except (ConfigError, DataError) as error:
        sys.stderr.write(f"vrl {given[0]}: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"vrl {given[0]}: interrupted\n")
        return 130


def _usage() -> str:
    lines = [f"  {name:<6} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: vrl COMMAND [options]", "", *lines, "", "vrl COMMAND --help says more.", ""])


if __name__ == "__main__":
    sys.exit(main())
