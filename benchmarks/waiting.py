"""The environment of `benchmarks/agent.py`: every turn takes as long as the row says. Loaded in tool processes."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from vrl.agent.environments.types import Observation, StepResult
from vrl.protocol.trajectory import Prompt


class Waiting:
    """An episode whose turn k takes `tools_kwargs["seconds"][k]`."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self._seconds = list(seconds)

    def step(self, text: str) -> StepResult:  # noqa: ARG002  (part of the interface)
        """Wait, and answer."""
        time.sleep(self._seconds.pop(0))
        return StepResult(observation=Observation(messages=({"role": "tool", "content": "go on"},)))

    def close(self) -> None:
        """Hold nothing."""


class WaitingKind:
    """Makes `Waiting`."""

    schemas: Sequence[Mapping[str, Any]] = ()

    def start(self, prompt: Prompt) -> Waiting:
        """Return the environment of one episode."""
        return Waiting(prompt.tools_kwargs["seconds"])

    def close(self) -> None:
        """Hold nothing."""
