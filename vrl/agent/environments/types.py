"""What the turn loop and an environment say to each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final, runtime_checkable

from vrl.protocol.trajectory import Prompt


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Chat messages that answer a model turn (roles `tool` or `user`), several tool results in a row included.

    In their text `<image>` stands for the next of `images` (encoded, PNG or JPEG). Special tokens spelled out in the
    text are text: the renderer neutralises them.
    """

    messages: tuple[Mapping[str, Any], ...]
    images: tuple[bytes, ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a model turn led to. Without an observation, or with `done`, the episode ends."""

    observation: Observation | None = None
    reward: float = 0.0  # of this turn; put on its last sampled token
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])  # to the rollout file; numbers become metrics


class Environment(Protocol):
    """The world of one episode. Its methods are called one after the other; those of other episodes at the same time.

    An exception is a failure outside the model: the episode is tried again or dropped, and never trained on. What a
    model can do wrong (no call, a bad call, code that fails) is an observation.
    """

    def step(self, text: str) -> StepResult:
        """Act on the text of a model turn, special tokens left out.

        A further parameter `cut: bool` is optional: whether the limit of a turn's tokens ended it.
        """
        ...

    def close(self) -> None:
        """Give back what the episode holds; called once, whatever ended it."""
        ...


@runtime_checkable
class Finishing(Protocol):
    """An environment that gives a reward for the whole episode, on top of the last turn's."""

    def finish(self) -> float:
        """Return it; asked for when a limit of turns, tokens, images or time ends the episode, and not `step`."""
        ...


class EnvironmentKind(Protocol):
    """What a row names as `env_name`: makes an environment for each of its episodes."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """OpenAI function schemas that the chat template shows the model; empty for none."""
        ...

    def start(self, prompt: Prompt) -> Environment:
        """Return the environment of one new episode, with `prompt.tools_kwargs` and its images."""
        ...

    def close(self) -> None:
        """Give back what the kind's episodes share, such as warm processes."""
        ...
