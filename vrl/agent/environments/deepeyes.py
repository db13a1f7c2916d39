"""Environments with DeepEyes' interface, `ToolBase`: `reset` once, then `execute` on the text of every turn.

A class needs `reset(raw_prompt, multi_modal_data, origin_multi_modal_data)` and
`execute(action_string) -> (observation, reward, done, info)`; inheriting from `ToolBase` here is one way. What it
raises fails its episode, which is tried again or dropped.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, final, runtime_checkable

from vrl.agent.environments.observations import TextLimit, count_marks, plain_text
from vrl.agent.environments.types import Observation, StepResult
from vrl.agent.plugins import construct
from vrl.agent.tools.pictures import PictureError, encoded, open_picture
from vrl.agent.tools.types import ToolFailure
from vrl.agent.tools.user_tools import finite
from vrl.protocol.messages import placed_images, replaced_images
from vrl.protocol.trajectory import IMAGE_MARK, Prompt

_ROLES: Final = frozenset({"user", "tool", "system"})  # of what an observation may say; a model's own words are none
_CHATML: Final = re.compile(r"<\|im_start\|>(\w+)\n?")
_TURN_END: Final = "<|im_end|>"
_CONSTRUCTOR_WORDS: Final = ("_name", "_desc", "_params")  # DeepEyes' constructors take them and get None


class ToolBase:
    """Parent for users' environments, as in DeepEyes. The settings name its file and the `env_name` of its rows."""

    name: str = ""

    def __init__(self, name: str | None = None, **_: Any) -> None:
        self.name = name or type(self).name

    def reset(self, raw_prompt: Any, multi_modal_data: Any, origin_multi_modal_data: Any, **kwargs: Any) -> Any:
        """Begin an episode: the messages, and `{"image": [PIL images]}` twice; keywords are the row's tools_kwargs."""

    def execute(self, action_string: str, **kwargs: Any) -> tuple[Any, float, bool, Mapping[str, Any]]:
        """Act on the text of a turn; return observation, reward of the turn, whether this is the end, and info."""
        raise NotImplementedError


@runtime_checkable
class DeepEyesTool(Protocol):
    """What a class must have to be one."""

    def reset(self, raw_prompt: Any, multi_modal_data: Any, origin_multi_modal_data: Any) -> Any:
        """Begin an episode."""
        ...

    def execute(self, action_string: str) -> tuple[Any, float, bool, Mapping[str, Any]]:
        """Act on the text of a turn."""
        ...


@final
class DeepEyesKind:
    """Makes one object of the class for each episode."""

    schemas: Sequence[Mapping[str, Any]] = ()  # the row's own prompt describes the tools

    def __init__(self, kind: type[Any], config: Mapping[str, Any], key: str, limit: TextLimit) -> None:
        """Check that the class can be made. Raises ConfigError that begins with `key`. `limit` is of a message."""
        self._limit = limit
        parameters = inspect.signature(kind).parameters
        words = {word: None for word in _CONSTRUCTOR_WORDS if word in parameters}
        self._make: Callable[[], Any] = lambda: construct(kind, key, **{**words, **config})
        self._make()

    def start(self, prompt: Prompt) -> "DeepEyesEnvironment":
        """Return the environment of one episode, reset."""
        tool = self._make()
        messages = [dict(message) for message in prompt.messages]
        tool.reset(
            raw_prompt=messages,
            multi_modal_data={"image": [open_picture(image) for image in prompt.images]},
            origin_multi_modal_data={"image": [open_picture(image) for image in prompt.images]},
            **prompt.tools_kwargs,
        )
        return DeepEyesEnvironment(tool, self._limit)

    def close(self) -> None:
        """Hold nothing."""


@final
class DeepEyesEnvironment:
    """One episode of such an object."""

    def __init__(self, tool: Any, limit: TextLimit) -> None:
        self._tool = tool
        self._limit = limit

    def step(self, text: str) -> StepResult:
        """Return what `execute` says. Raises ToolFailure when that has another form than DeepEyes'."""
        returned = self._tool.execute(text)
        try:
            observation, reward, done, info = returned
            return StepResult(
                observation=read_observation(observation, self._limit),
                reward=finite(reward),
                done=bool(done),
                info=dict(info or {}),
            )
        except (TypeError, ValueError, KeyError) as error:
            raise ToolFailure(
                f"{type(self._tool).__name__}.execute must return (observation, reward, done, info): {error}"
            ) from error

    def close(self) -> None:
        """Let the object go."""


def read_observation(observation: Any, limit: TextLimit) -> Observation | None:
    """Return an observation of DeepEyes as messages with images; None for an empty one.

    A text may bring the chat template's own marks (`<|im_end|>\\n<|im_start|>user\\n...`): they are read as messages.
    A mapping has `prompt` (text) or `chat` (messages), and `multi_modal_data` with `image`. Images without a mark
    stand before the text of the first message, as in DeepEyes; one that cannot be read becomes a text. Without images a
    mark in a text is part of it: tools repeat what a model wrote. The text of a message is cut to `limit`. Raises
    ValueError when there are more marks than images.
    """
    images: list[bytes] = []
    faults: dict[int, str] = {}
    if isinstance(observation, Mapping):
        data = observation.get("multi_modal_data") or {}
        for number, image in enumerate(data.get("image") or []):
            try:
                images.append(encoded(image))
            except (PictureError, SystemError, ValueError) as error:  # no pixels are no PNG
                faults[number] = f"[image left out: {error}]"
        observation = observation.get("chat") or observation.get("prompt")
    if not observation:
        if not images and not faults:
            return None
        observation = IMAGE_MARK * (len(images) + len(faults))
    written = _as_it_is if images or faults else plain_text
    if isinstance(observation, str):
        messages = _read_text(written(observation))
    else:
        messages = [_message(item, written) for item in observation]
    if not messages:
        return None
    marked = _with_marks(messages, len(images) + len(faults))
    marked = [{**message, "content": limit.cut_around_images(message["content"])} for message in marked]
    if faults:
        marked = replaced_images(placed_images(marked, len(images) + len(faults)), faults)
    return Observation(messages=tuple(marked), images=tuple(images))


def _read_text(text: str) -> list[dict[str, Any]]:
    pieces = _CHATML.split(text)
    first = _spoken(pieces[0])
    messages = [{"role": "user", "content": first}] if first else []
    for role, content in zip(pieces[1::2], pieces[2::2], strict=True):
        spoken = _spoken(content)
        if role in _ROLES and spoken:
            messages.append({"role": role, "content": spoken})
    return messages


def _spoken(content: str) -> str:
    return content.replace(_TURN_END, "").strip()


def _as_it_is(text: str) -> str:
    return text


def _message(message: Mapping[str, Any], written: Callable[[str], str]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        content = written(content)
    else:
        parts = (
            IMAGE_MARK if part.get("type") in ("image", "image_url") else plain_text(part["text"]) for part in content
        )
        content = "".join(parts)
    return {**message, "content": content}


def _with_marks(messages: list[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    marks = count_marks(messages)
    if marks > images:
        raise ValueError(f"the observation has {marks} marks {IMAGE_MARK} for {images} images")
    missing = IMAGE_MARK * (images - marks)
    return [{**messages[0], "content": missing + messages[0]["content"]}, *messages[1:]] if missing else messages
