"""Tools of users with verl's interface: `create`, `execute`, `calc_reward`, `release`, asynchronous or not.

A class may inherit from `BaseTool` here or just have these methods; only `execute` is needed. Differences from verl:
`create` and `release` are called once an episode, not once a call, so that state lives as long as the episode does;
the schema is a plain mapping; what `calc_reward` returns is added to the last turn's reward.
"""

import asyncio
import inspect
import logging
import math
import traceback
import uuid
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeVar, final, runtime_checkable

from vrl.agent.tools.event_loop import EventLoopThread
from vrl.agent.tools.pictures import PictureError, encoded
from vrl.agent.tools.schemas import checked_schema
from vrl.agent.tools.types import Answering, ToolAnswer, ToolFailure, failed
from vrl.protocol.errors import ConfigError
from vrl.protocol.trajectory import Prompt

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_MAX_TRACEBACK_CHARACTERS: Final = 4000
_OF_FILES: Final = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_METHODS: Final = ("create", "execute", "calc_reward", "release")


@dataclass
class ToolResponse:
    """What `execute` returns: text and images (PIL or encoded bytes). `video` is there for verl's tools and refused."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


@runtime_checkable
class _Response(Protocol):
    text: Any
    image: Any
    video: Any


class BaseTool:
    """Parent for users' tools; override what is needed. `config` and `tool_schema` are from the settings file."""

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any] | None = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name: str = self.tool_schema["function"]["name"]

    def get_openai_tool_schema(self) -> Mapping[str, Any]:
        """Return the schema of a tool that the settings file gives none."""
        raise NotImplementedError(f"{type(self).__name__} has no schema: write tool_schema into the settings file")

    def create(self, instance_id: str, **kwargs: Any) -> Any:
        """Begin an episode; keyword arguments are the row's `tools_kwargs.<name>.create_kwargs`."""

    def execute(self, instance_id: str, parameters: Mapping[str, Any], **kwargs: Any) -> Any:
        """Carry out a call; return a response (ToolResponse, text or mapping), or (response, reward, metrics)."""
        raise NotImplementedError

    def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:  # noqa: ARG002 - for those who override it
        """Return the reward of the episode."""
        return 0.0

    def release(self, instance_id: str, **kwargs: Any) -> Any:
        """End an episode."""


@final
class UserTool:
    """Runs an object with verl's tool methods. What it raises in a call is an answer for the model."""

    def __init__(self, tool: Any, schema: Any, key: str) -> None:
        """Check the schema and that `execute` takes a call. Raises ConfigError that begins with `key`."""
        self.schema = checked_schema(schema, key)
        self._methods: dict[str, Callable[..., Any]] = {
            name: method for name in _METHODS if callable(method := getattr(tool, name, None))
        }
        if "execute" not in self._methods:
            raise ConfigError(f"{key}: {type(tool).__name__} has no method execute(instance_id, parameters)")
        try:
            inspect.signature(self._methods["execute"]).bind_partial("instance", {})
        except TypeError as error:
            raise ConfigError(
                f"{key}: {type(tool).__name__}.execute takes no (instance_id, parameters): {error}"
            ) from error
        self.scores = inspect.getattr_static(tool, "calc_reward", BaseTool.calc_reward) is not BaseTool.calc_reward
        self._asynchronous = any(map(inspect.iscoroutinefunction, self._methods.values()))
        self._loop = EventLoopThread("user-tool")

    @property
    def name(self) -> str:
        """What the model calls it."""
        return self.schema["function"]["name"]

    def start(self, prompt: Prompt, options: Mapping[str, Any]) -> "_UserSession":
        """Return one episode's session; `create` is called before its first call."""
        return _UserSession(self, prompt, options)

    def close(self) -> None:
        """End the thread of asynchronous methods."""
        self._loop.close()

    def begin(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Begin to run a coroutine: an asynchronous tool's in the loop, another's here and now."""
        if self._asynchronous:
            return self._loop.submit(coroutine)
        done: Future[_T] = Future()
        try:
            coroutine.send(None)
        except StopIteration as end:
            done.set_result(end.value)
        else:
            coroutine.close()
            raise TypeError(f"the tool {self.name} waits for something; declare its methods with async def")
        return done

    async def invoke(self, name: str, positional: tuple[Any, ...], offered: Mapping[str, Any]) -> Any:
        """Call a method, if there is one, with those of the offered keyword arguments that it takes."""
        method = self._methods.get(name)
        if method is None:
            return None
        result = method(*positional, **_taken(method, len(positional), offered))
        return await result if inspect.isawaitable(result) else result


@final
class _UserSession:
    def __init__(self, tool: UserTool, prompt: Prompt, options: Mapping[str, Any]) -> None:
        self._tool = tool
        self._prompt = prompt
        self._options = options
        self._creating = asyncio.Lock()
        self._instance_id: str | None = None

    def call(self, arguments: Mapping[str, Any]) -> Answering:
        return self._tool.begin(self._execute(dict(arguments)))

    def finish(self) -> float:
        return self._tool.begin(self._reward()).result()

    def close(self) -> None:
        self._tool.begin(self._release()).result()

    async def _execute(self, arguments: dict[str, Any]) -> ToolAnswer:
        name = self._tool.name
        try:
            instance_id = await self._created()
            offered = self._offered("execute_kwargs")
            returned = await self._tool.invoke("execute", (instance_id, arguments), offered)
        except ToolFailure:
            raise
        except Exception as error:  # a user's tool may raise anything
            if _is_outside(error):
                raise ToolFailure(f"the tool {name} failed: {type(error).__name__}: {error}") from error
            _LOG.warning("tool %s failed in a call", name, exc_info=True)
            told = failed(f"the tool {name} failed: {type(error).__name__}: {error!s:.500}")
            return replace(told, traceback=traceback.format_exc()[-_MAX_TRACEBACK_CHARACTERS:])
        try:
            return answer_of(returned)
        except PictureError as error:
            return replace(failed(str(error)), traceback=traceback.format_exc()[-_MAX_TRACEBACK_CHARACTERS:])
        except (TypeError, ValueError) as error:
            raise ToolFailure(f"execute of the tool {name}: {error}") from error

    async def _reward(self) -> float:
        if not self._tool.scores:
            return 0.0
        offered = self._offered("calc_reward_kwargs")
        reward = await self._tool.invoke("calc_reward", (await self._created(),), offered)
        try:
            return finite(reward or 0.0)
        except (TypeError, ValueError) as error:
            raise ToolFailure(f"calc_reward of the tool {self._tool.name}: {error}") from error

    async def _release(self) -> None:
        instance_id, self._instance_id = self._instance_id, None
        if instance_id is not None:
            await self._tool.invoke("release", (instance_id,), self._offered("release_kwargs"))

    async def _created(self) -> str:
        async with self._creating:
            if self._instance_id is None:
                instance_id = uuid.uuid4().hex
                returned = await self._tool.invoke("create", (instance_id,), self._offered("create_kwargs"))
                if isinstance(returned, tuple):  # (instance_id, response) in newer versions of verl
                    returned = returned[0]
                self._instance_id = returned if isinstance(returned, str) else instance_id
            return self._instance_id

    def _offered(self, name: str) -> dict[str, Any]:
        """Return the row's keyword arguments, both one by one and as a whole: verl's tools read either."""
        given = dict(self._options.get(name) or {})
        return {**given, name: given, "prompt": self._prompt}


def _is_outside(error: BaseException | None) -> bool:
    """Whether an exception, or what it was raised from, tells of a service or a machine and not of the call.

    Files that are missing or must not be read are no such thing: models name files.
    """
    while error is not None:
        if isinstance(error, OSError | MemoryError) and not isinstance(error, _OF_FILES):
            return True
        error = error.__cause__
    return False


def finite(reward: Any) -> float:
    """Return a reward as a number. Raises TypeError or ValueError when it is none or not finite."""
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}")
    return number


def answer_of(returned: Any) -> ToolAnswer:
    """Read what `execute` returned.

    Raises TypeError when it is no response, ValueError for a reward that is not finite, PictureError for a bad image.
    """
    response, reward, metrics = returned, 0.0, {}
    if isinstance(returned, tuple):
        response, reward, metrics = (*returned, *(None, None, None)[len(returned) :])[:3]
    if isinstance(response, _Response):  # ToolResponse, of this package or of verl
        response = {"text": response.text, "image": response.image, "video": response.video}
    elif response is None or isinstance(response, str | int | float):
        response = {"text": "" if response is None else str(response)}
    if not isinstance(response, Mapping):
        raise TypeError(f"execute returned {type(response).__name__}; return a ToolResponse, a text or a mapping")
    if response.get("video"):
        raise TypeError("videos are not supported")
    images = response.get("image") or []
    images = images if isinstance(images, list | tuple) else [images]
    return ToolAnswer(
        text=str(response.get("text") or ""),
        images=tuple(encoded(image) for image in images),
        reward=finite(reward or 0.0),
        info=dict(metrics or {}),
    )


def _taken(method: Callable[..., Any], num_positional: int, offered: Mapping[str, Any]) -> dict[str, Any]:
    parameters = list(inspect.signature(method).parameters.values())[num_positional:]
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        named |= set(offered) - {"prompt"}
    return {name: value for name, value in offered.items() if name in named}
