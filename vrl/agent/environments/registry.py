"""Environments by name: those built in, those of the settings, and the classes of users.

    actor_rollout_ref.rollout.agent.environments:
      my_tools: {class: tools, config: {tools: [calculator, {class_name: my_tools.py:Weather, ...}]}}
      my_game: {class: games.py:Game, config: {size: 4}}

A row names one in `env_name`; no name means `plain`.
"""

import inspect
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, final, runtime_checkable

from vrl.agent.environments.code import CODE_PARSERS, CodeKind
from vrl.agent.environments.deepeyes import DeepEyesKind, DeepEyesTool
from vrl.agent.environments.observations import TextLimit
from vrl.agent.environments.plain import PlainKind
from vrl.agent.environments.tool_calls import ToolKind, TurnLimits
from vrl.agent.environments.types import Environment, EnvironmentKind, StepResult
from vrl.agent.plugins import construct, load_class
from vrl.agent.sandbox.types import CodeRunner
from vrl.agent.tools.configured import build_tools, read_tool_file
from vrl.agent.tools.interpreter import runner_of
from vrl.agent.tools.types import ImageLimits, ToolResources
from vrl.protocol.config.schema import Config
from vrl.protocol.errors import ConfigError, DataError
from vrl.protocol.trajectory import Prompt

PLAIN: Final = "plain"
_KEY: Final = "actor_rollout_ref.rollout.agent.environments"
_FILE_KEY: Final = "actor_rollout_ref.rollout.multi_turn.tool_config_path"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """What the settings of a run say about environments; pickles, so that tool processes can have it."""

    environments: Mapping[str, Any] = field(default_factory=dict[str, Any])  # name -> {class, config}
    tool_config_path: str | None = None  # YAML file of the environment `tools`
    limits: TurnLimits = field(default_factory=TurnLimits)


@final
@dataclass(frozen=True, slots=True)
class _Built:
    """What a kind is built from."""

    config: Mapping[str, Any]
    settings: EnvironmentSettings
    resources: ToolResources
    key: str

    def take(self, **defaults: Any) -> dict[str, Any]:
        """Return the config with its defaults. Raises ConfigError on a setting that the environment does not have."""
        unknown = set(self.config) - set(defaults)
        if unknown:
            raise ConfigError(
                f"{self.key}.config: there is no setting {', '.join(sorted(unknown))}; "
                f"there are {', '.join(defaults) or 'none'}"
            )
        return {**defaults, **self.config}

    def limits(self, config: Mapping[str, Any]) -> TurnLimits:
        """Return the limits of a turn, with those that the environment's own config sets.

        Raises ConfigError when one of them, or the role, is no value that would do.
        """
        for name in ("max_parallel_calls", "max_tool_response_length"):
            if type(config[name]) is not int or config[name] < 1:
                raise ConfigError(f"{self.key}.config.{name}={config[name]!r}: a whole number of at least 1 is wanted")
        for name, allowed in (
            ("tool_response_truncate_side", ("left", "right", "middle")),
            ("role", ("tool", "user")),
            ("show_schemas", (True, False)),
        ):
            if config[name] not in allowed:
                raise ConfigError(
                    f"{self.key}.config.{name}={config[name]!r}: use one of {', '.join(map(str, allowed))}"
                )
        limits = self.settings.limits
        text = replace(
            limits.text,
            max_characters=config["max_tool_response_length"],
            side=config["tool_response_truncate_side"],
        )
        return replace(limits, max_parallel_calls=config["max_parallel_calls"], text=text)

    def turn_defaults(self) -> dict[str, Any]:
        """Return what every environment with tools may set for itself."""
        limits = self.settings.limits
        return {
            "max_parallel_calls": limits.max_parallel_calls,
            "max_tool_response_length": limits.text.max_characters,
            "tool_response_truncate_side": limits.text.side,
            "role": "tool",
            "show_schemas": True,
        }


def _plain(built: _Built) -> EnvironmentKind:
    built.take()
    return PlainKind()


def _tools(built: _Built) -> EnvironmentKind:
    config = built.take(tools=None, tool_config_path=built.settings.tool_config_path, **built.turn_defaults())
    if config["tools"] is not None:
        entries, key = config["tools"], f"{built.key}.config.tools"
    elif config["tool_config_path"] is not None:
        entries, key = read_tool_file(config["tool_config_path"]), f"{config['tool_config_path']}: tools"
    else:
        raise ConfigError(f"{built.key}: the environment tools needs {_FILE_KEY}, or config.tools in its entry")
    return ToolKind(
        build_tools(entries, built.resources, key), built.limits(config), config["role"], config["show_schemas"]
    )


def _image_tools(built: _Built) -> EnvironmentKind:
    limits = built.settings.limits.images
    pixels = {
        "min_side": limits.min_side,
        "min_pixels": limits.min_pixels,
        "max_pixels": limits.max_pixels,
        "max_aspect": limits.max_aspect,
    }
    config = built.take(**pixels, **built.turn_defaults())
    image_config = {name: config[name] for name in pixels}
    entries = [{"class_name": name, "config": image_config} for name in ("image_zoom_in_tool", "image_rotate_tool")]
    return ToolKind(
        build_tools(entries, built.resources, built.key), built.limits(config), config["role"], config["show_schemas"]
    )


def _code_interpreter(built: _Built) -> EnvironmentKind:
    config = built.take(format="python", **built.turn_defaults())
    limits = built.limits(config)
    if config["format"] == "hermes":
        return ToolKind(
            build_tools(["python"], built.resources, built.key), limits, config["role"], config["show_schemas"]
        )
    if config["format"] not in CODE_PARSERS:
        known = ", ".join([*CODE_PARSERS, "hermes"])
        raise ConfigError(f"{built.key}.config.format={config['format']!r}: use one of {known}")
    runner = runner_of(built.resources, f"{built.key}: the environment code_interpreter")
    return CodeKind(runner, CODE_PARSERS[config["format"]], limits, config["role"])


BUILT_IN: Final[Mapping[str, Callable[[_Built], EnvironmentKind]]] = {
    PLAIN: _plain,
    "tools": _tools,
    "code_interpreter": _code_interpreter,
    "image_tools": _image_tools,
}


@runtime_checkable
class _Starts(Protocol):
    def start(self, prompt: Prompt) -> Environment: ...


@runtime_checkable
class _Steps(Protocol):
    def step(self, text: str) -> StepResult: ...


@final
class _SimpleKind:
    """Makes a user's environments, `Class(prompt, **config)`, one an episode."""

    def __init__(self, kind: type[Any], config: Mapping[str, Any], key: str) -> None:
        try:
            inspect.signature(kind).bind(None, **config)
        except TypeError as error:
            raise ConfigError(f"{key}: {kind.__name__} is made with (prompt, **config): {error}") from error
        self._kind = kind
        self._config = config
        self.schemas = tuple(vars(kind).get("schemas", ()))

    def start(self, prompt: Prompt) -> Environment:
        return self._kind(prompt, **self._config)

    def close(self) -> None:
        pass


def known_environments(settings: EnvironmentSettings) -> list[str]:
    """Return the names that rows may use. Loads no class: a driver checks its data against them."""
    return sorted({*BUILT_IN, *settings.environments})


def settings_of(config: Config) -> EnvironmentSettings:
    """Return what a run's settings say about environments.

    Raises ConfigError when `multi_turn.format` is no form of tool calls that is read here.
    """
    rollout, multi_turn = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.multi_turn
    if multi_turn.format != "hermes":
        raise ConfigError(
            f"actor_rollout_ref.rollout.multi_turn.format={multi_turn.format!r}: tool calls are read as hermes; for "
            "Python in fences use the environment code_interpreter"
        )
    text = TextLimit(max_characters=multi_turn.max_tool_response_length, side=multi_turn.tool_response_truncate_side)
    pixels = config.actor_rollout_ref.model.max_pixels
    images = ImageLimits() if pixels is None else ImageLimits(max_pixels=pixels)
    return EnvironmentSettings(
        environments=rollout.agent.environments,
        tool_config_path=multi_turn.tool_config_path,
        limits=TurnLimits(max_parallel_calls=multi_turn.max_parallel_calls, text=text, images=images),
    )


@final
class Environments:
    """The kinds of one process, each built when a row first asks for it. `kind` may be called from several threads."""

    def __init__(self, settings: EnvironmentSettings, code_runner: CodeRunner | None = None) -> None:
        self._settings = settings
        self._resources = ToolResources(code_runner=code_runner, image_limits=settings.limits.images)
        self._kinds: dict[str, EnvironmentKind] = {}
        self._lock = threading.Lock()

    def kind(self, env_name: str | None) -> EnvironmentKind:
        """Return the kind that a row names, `plain` for None.

        Raises DataError for an unknown name, with the known ones, ConfigError when it cannot be built.
        """
        name = env_name or PLAIN
        with self._lock:
            if name not in self._kinds:
                self._kinds[name] = self._build(name)
            return self._kinds[name]

    def start(self, prompt: Prompt) -> Environment:
        """Return the environment of one new episode of a row."""
        return self.kind(prompt.env_name).start(prompt)

    def close(self) -> None:
        """Close all kinds, whatever one of them raises."""
        with self._lock, ExitStack() as stack:
            for kind in self._kinds.values():
                stack.callback(kind.close)
            self._kinds = {}

    def _build(self, name: str) -> EnvironmentKind:
        entry = self._settings.environments.get(name)
        if entry is None and name in BUILT_IN:
            return BUILT_IN[name](_Built({}, self._settings, self._resources, name))
        if entry is None:
            known = ", ".join(known_environments(self._settings))
            raise DataError(
                f"env_name {name!r} is unknown; known are {known}. Add it to {_KEY}, or leave the cell empty"
            )
        return self._configured(f"{_KEY}.{name}", entry)

    def _configured(self, key: str, entry: Any) -> EnvironmentKind:
        if isinstance(entry, str):
            entry = {"class": entry}
        if (
            not isinstance(entry, Mapping)
            or set(entry) - {"class", "config"}
            or not isinstance(entry.get("class"), str)
        ):
            raise ConfigError(f"{key}={entry!r}: give {{class: ..., config: {{...}}}}")
        name, config = entry["class"], dict(entry.get("config") or {})
        if name in BUILT_IN:
            return BUILT_IN[name](_Built(config, self._settings, self._resources, key))
        if ":" not in name and "." not in name:
            raise ConfigError(f"{key}.class={name!r}: built in are {', '.join(BUILT_IN)}; else give module:Class")
        kind = load_class(name, f"{key}.class")
        if issubclass(kind, _Starts):
            return construct(kind, key, **config)
        if issubclass(kind, _Steps):
            return _SimpleKind(kind, config, key)
        if issubclass(kind, DeepEyesTool):
            return DeepEyesKind(kind, config, key, self._settings.limits.text)
        raise ConfigError(
            f"{key}.class={name!r} is no environment: it needs start(prompt), or step(text), or reset and execute"
        )
