"""What a pool and its tool processes send each other.

Requests are pickles of the dataclasses here. Answers are a JSON header and the bytes of images behind it: nothing that
a user's environment returns is ever unpickled in the worker.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from vrl.agent.environments.types import Observation, StepResult
from vrl.protocol.messages import placed_images, replaced_images
from vrl.protocol.trajectory import Prompt

MAX_ANSWER_BYTES = 1 << 26
_MAX_IMAGE_BYTES = 3 << 24  # of them
_ROLES = ("tool", "user", "system", "assistant")
_HEADER = struct.Struct("<I")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class KindSpec:
    """How a tool process makes one kind of environment.

    `factory` is `module:name`; the name is called once a process, with `kwargs` as keyword arguments, and returns an
    `EnvironmentKind`: a class of that interface, or a function such as `def make(**settings: Any) -> EnvironmentKind`.
    It raises ConfigError, or any other exception, when the settings cannot be used. Neither may import torch.
    """

    factory: str
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """All kinds of a run, by what rows call them in `env_name`. Picklable."""

    kinds: Mapping[str, KindSpec] = field(default_factory=dict[str, KindSpec])


@final
@dataclass(frozen=True, slots=True)
class Start:
    """Begin an episode under a number of the pool's. What goes wrong shows at the first step.

    The answer has the number's negative: it says only that the call has ended.
    """

    episode: int
    prompt: Prompt


@final
@dataclass(frozen=True, slots=True)
class Step:
    """Act on a model turn."""

    episode: int
    text: str
    cut: bool = False  # whether the limit of a turn's tokens ended it


@final
@dataclass(frozen=True, slots=True)
class Finish:
    """Ask for the reward of the whole episode, which ends without its environment."""

    episode: int


@final
@dataclass(frozen=True, slots=True)
class Close:
    """Give back what the episode holds. No answer."""

    episode: int


@final
@dataclass(frozen=True, slots=True)
class Ping:
    """Asks whether the process still runs Python: a call that holds the interpreter's lock stops all its episodes."""


Request = Start | Step | Finish | Close
PONG_EPISODE = 0  # the number of no episode: the answer to a ping


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """A step's result, or why there is none: a failure outside the model, as `kind: detail`."""

    result: StepResult | None = None
    failure: str | None = None
    run_seconds: float = 0.0  # in the environment
    wait_seconds: float = 0.0  # for a thread, for the start of the environment, and on the way
    charged: bool = True  # whether a failure is the episode's own; else another's call brought its process down
    suspect: bool = False  # its process died while a call of it was under way: it may have been this one


def encode_answer(episode: int, outcome: StepOutcome) -> bytes:
    """Return the bytes of an answer.

    Raises TypeError or ValueError, saying so, when what an environment returned is no `StepResult` of plain values.
    """
    header: dict[str, Any] = {"episode": episode, "failure": outcome.failure, "seconds": outcome.run_seconds}
    images: tuple[bytes, ...] = ()
    if outcome.result is not None:
        result = outcome.result
        if not isinstance(result, StepResult):
            raise TypeError(f"step() returned {type(result).__name__}, a StepResult is wanted")
        header |= {"reward": _number(result.reward), "done": bool(result.done), "info": dict(result.info)}
        if result.observation is not None:
            messages, images = _fitting(result.observation)
            header |= {"messages": [_message(message) for message in messages]}
    header["images"] = [len(image) for image in images]
    # No tokenizer takes half a surrogate pair, and a tool may print one.
    head = json.dumps(header, default=_plain, skipkeys=True, ensure_ascii=False).encode(errors="replace")
    size = len(head) + sum(header["images"])
    if size > MAX_ANSWER_BYTES:
        raise ValueError(f"a step returned {size} bytes, at most {MAX_ANSWER_BYTES} are taken")
    return b"".join([_HEADER.pack(len(head)), head, *images])


def decode_answer(payload: bytes, waited_and_run: float) -> StepOutcome:
    """Return the outcome; `waited_and_run` are the seconds since it was asked for."""
    end = _HEADER.size + _HEADER.unpack_from(payload)[0]
    header = json.loads(payload[_HEADER.size : end])
    images: list[bytes] = []
    for size in header["images"]:
        images.append(payload[end : end + size])
        end += size
    seconds = header["seconds"]
    times = {"run_seconds": seconds, "wait_seconds": max(waited_and_run - seconds, 0.0)}
    if header["failure"] is not None:
        return StepOutcome(failure=header["failure"], **times)
    observation = None
    if "messages" in header:
        observation = Observation(messages=tuple(header["messages"]), images=tuple(images))
    result = StepResult(observation=observation, reward=header["reward"], done=header["done"], info=header["info"])
    return StepOutcome(result=result, **times)


def episode_of(payload: bytes) -> int:
    """Return the number of the episode that an answer is for."""
    end = _HEADER.size + _HEADER.unpack_from(payload)[0]
    return json.loads(payload[_HEADER.size : end])["episode"]


def _fitting(observation: Observation) -> tuple[Sequence[Mapping[str, Any]], tuple[bytes, ...]]:
    """Return messages and images, with a note in the place of each image that is too much for an answer."""
    left, kept, notes = _MAX_IMAGE_BYTES, list[bytes](), dict[int, str]()
    for number, image in enumerate(observation.images):
        if len(image) <= left:
            left -= len(image)
            kept.append(bytes(image))
        else:
            notes[number] = f"[image left out: the images of a turn may have {_MAX_IMAGE_BYTES} bytes together]"
    if not notes:
        return observation.messages, tuple(kept)
    return replaced_images(placed_images(observation.messages, len(observation.images)), notes), tuple(kept)


def _message(message: Any) -> dict[str, Any]:
    message = dict(message)
    content = message.get("content")
    parts = [] if isinstance(content, str | None) else list(content)
    if message.get("role") not in _ROLES or not all(isinstance(part, Mapping) for part in parts):
        raise TypeError(
            f"an observation holds {message!r:.200}; a role of {_ROLES}, and text or typed parts, are wanted"
        )
    return {**message, "content": content if isinstance(content, str) else [dict(part) for part in parts]}


def _number(value: Any) -> float:
    number = float(value)
    if number - number != 0.0:
        raise ValueError(f"the reward of a step is {number}, a finite number is wanted")
    return number


def _plain(value: Any) -> Any:
    """Return numbers of numpy as numbers, other values as text."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return str(value)
