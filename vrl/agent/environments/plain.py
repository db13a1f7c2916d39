"""The environment of a row without one: the model answers once."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from vrl.agent.environments.types import StepResult
from vrl.protocol.trajectory import Prompt


@final
class PlainEnvironment:
    """Ends the episode after the first turn."""

    def step(self, text: str) -> StepResult:  # noqa: ARG002 - whatever it says
        """Return that there is nothing more."""
        return StepResult()

    def close(self) -> None:
        """Hold nothing."""


@final
class PlainKind:
    """`plain`: no tools, one turn."""

    schemas: Sequence[Mapping[str, Any]] = ()

    def start(self, prompt: Prompt) -> PlainEnvironment:  # noqa: ARG002 - the same for every row
        """Return the environment of one episode."""
        return PlainEnvironment()

    def close(self) -> None:
        """Hold nothing."""
