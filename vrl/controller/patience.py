"""When a run gives up: after too many steps that taught it nothing. The trainer asks once a step is logged."""

from collections.abc import Mapping
from typing import Final, final

from vrl.protocol.errors import WorkerError

# Who takes optimizer steps, and the key of its learning rate.
_RATES: Final = {"actor": "actor_rollout_ref.actor.optim.lr", "critic": "critic.optim.lr"}


@final
class Patience:
    """Counts steps without a row to learn from; the learners count gradients that are not finite themselves."""

    def __init__(self, max_steps_without_samples: int, max_nonfinite_steps: int) -> None:
        self._max_steps_without_samples = max_steps_without_samples
        self._max_nonfinite_steps = max_nonfinite_steps
        self._steps_without_samples = 0

    def count(self, rows: int) -> None:
        """Take note of a step that had so many rows to learn from."""
        self._steps_without_samples = 0 if rows else self._steps_without_samples + 1

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raise WorkerError when a step with these metrics is one too many."""
        if self._steps_without_samples >= self._max_steps_without_samples:
            raise WorkerError(
                f"{self._steps_without_samples} steps in a row had no row to learn from: episodes failed, or their "
                "rewards were all equal; see the rollout files (trainer.max_steps_without_samples sets when a run "
                "gives up)"
            )
        for role, rate in _RATES.items():
            skipped = metrics.get(f"{role}/skipped_in_a_row", 0.0)
            if skipped >= self._max_nonfinite_steps:
                raise WorkerError(
                    f"{int(skipped)} optimizer steps of the {role} in a row had a gradient that was not finite; lower "
                    f"{rate} or look at the last rollouts (trainer.max_nonfinite_steps sets when a run gives up)"
                )
