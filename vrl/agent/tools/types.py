"""What a tool is to an environment: a schema for the model, and a session for each episode."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from vrl.agent.sandbox.types import CodeRunner
from vrl.protocol.errors import ConfigError
from vrl.protocol.trajectory import Prompt


class ToolFailure(RuntimeError):
    """A tool or its service failed in a way the model has no part in: the episode is tried again or dropped."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """What one call returned."""

    text: str = ""
    images: tuple[bytes, ...] = ()  # PNG or JPEG; they stand after the text
    reward: float = 0.0  # added to the turn's
    failed: bool = False  # the model called it in a wrong way, or what it asked for did not work; `text` says why
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])  # to the rollout file; numbers become metrics
    traceback: str | None = None  # of an exception that the model is told of; for the rollout file


Answering = ToolAnswer | Future[ToolAnswer]  # an answer, or one on its way while further calls of the turn begin


class ToolSession(Protocol):
    """A tool in one episode; no other episode sees its state."""

    def call(self, arguments: Mapping[str, Any]) -> Answering:
        """Carry out one call whose arguments fit the schema, or begin to; calls begin in the model's order."""
        ...

    def finish(self) -> float:
        """Return the reward of the whole episode, asked for when the model has ended it."""
        ...

    def close(self) -> None:
        """Give back what the episode holds."""
        ...


class Tool(Protocol):
    """A tool of many episodes; its methods may be called from several threads."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """The OpenAI function schema: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
        ...

    def start(self, prompt: Prompt, options: Mapping[str, Any]) -> ToolSession:
        """Return the session of one episode; `options` is the row's `tools_kwargs[<tool name>]`.

        `prompt` is an object of the episode's own, the same for all its tools.
        """
        ...

    def close(self) -> None:
        """Give back what all episodes share."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Sizes of images that tools hand to the model, in pixels. What is too large or too small is resized."""

    min_side: int = 28  # the shorter side is at least this
    min_pixels: int = 0  # height times width at least
    max_pixels: int = 4_194_304  # height times width at most
    max_aspect: float = 100.0  # longer side by shorter side; beyond it an image is refused


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResources:
    """What built-in tools may need from outside."""

    code_runner: CodeRunner | None = None  # where a model's code runs; None: this process has no sandbox
    image_limits: ImageLimits = field(default_factory=ImageLimits)


def function_schema(name: str, description: str, properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    """Return an OpenAI function schema with these parameters."""
    parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def check_settings(settings: Iterable[str], allowed: Iterable[str], who: str) -> None:
    """Raise ConfigError, which begins with `who`, when there is a setting that is not one of those allowed."""
    known = list(allowed)
    unknown = sorted(str(name) for name in settings if name not in known)
    if unknown:
        raise ConfigError(f"{who} has no setting {', '.join(unknown)}; it has {', '.join(known) or 'none'}")


def failed(text: str) -> ToolAnswer:
    """Return an answer that tells the model what went wrong."""
    return ToolAnswer(text=f"Error: {text}", failed=True)


@final
class _Stateless:
    def __init__(self, call: Callable[[Mapping[str, Any]], Answering]) -> None:
        self._call = call

    def call(self, arguments: Mapping[str, Any]) -> Answering:
        return self._call(arguments)

    def finish(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


@final
class StatelessTool:
    """A tool that remembers nothing between calls: a function of the prompt and the arguments."""

    def __init__(
        self,
        schema: Mapping[str, Any],
        call: Callable[[Prompt, Mapping[str, Any]], Answering],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.schema = schema
        self.close = close
        self._call = call

    def start(self, prompt: Prompt, options: Mapping[str, Any]) -> ToolSession:  # noqa: ARG002 - nothing to set
        """Return what answers one episode's calls."""
        return _Stateless(lambda arguments: self._call(prompt, arguments))
