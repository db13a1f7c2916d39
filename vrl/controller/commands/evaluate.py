"""`vrl eval`: evaluate a model on `data.val_files`, once, without training."""

from collections.abc import Sequence

from vrl.controller.commands import train


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    return train.main([*arguments, "trainer.val_only=True"])
