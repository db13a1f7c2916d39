"""The environments of a run, as its settings name them: what tool processes load, and which rows may use them."""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, final

from vrl.agent.environments.registry import BUILT_IN, PLAIN, Environments, EnvironmentSettings, settings_of
from vrl.agent.environments.types import Environment, EnvironmentKind
from vrl.agent.environments.wire import EnvironmentSpec, KindSpec
from vrl.agent.sandbox.runner import make_runner
from vrl.agent.sandbox.types import CodeRunner, CodeSession
from vrl.agent.tools.configured import read_tool_file
from vrl.agent.tools.registry import ALIASES, without_effect
from vrl.protocol.config.sandbox import SandboxConfig
from vrl.protocol.config.schema import Config
from vrl.protocol.trajectory import Prompt

_FACTORY: Final = f"{__name__}:make_kind"


def environment_spec(config: Config) -> EnvironmentSpec:
    """Return what the tool processes of a run load: the entries of `rollout.agent.environments`."""
    rollout = config.actor_rollout_ref.rollout
    if not rollout.agent.environments:
        return EnvironmentSpec()
    shared = {"settings": settings_of(config), "sandbox": rollout.multi_turn.sandbox}
    return EnvironmentSpec(
        kinds={name: KindSpec(factory=_FACTORY, kwargs={"name": name, **shared}) for name in rollout.agent.environments}
    )


def with_built_in(config: Config, used: Collection[str]) -> Config:
    """Return the settings with an entry for each built-in environment that rows use without one."""
    rollout = config.actor_rollout_ref.rollout
    missing = [name for name in sorted(used) if name in BUILT_IN and name not in rollout.agent.environments]
    if not missing:
        return config
    entries = {**rollout.agent.environments, **{name: {"class": name} for name in missing}}
    rollout = replace(rollout, agent=replace(rollout.agent, environments=entries))
    return replace(config, actor_rollout_ref=replace(config.actor_rollout_ref, rollout=rollout))


def observation_roles(config: Config) -> dict[str, str]:
    """Return the role in which each configured built-in environment answers, by its name."""
    roles: dict[str, str] = {}
    for name, entry in config.actor_rollout_ref.rollout.agent.environments.items():
        kind = entry.get("class") if isinstance(entry, Mapping) else entry
        given = (entry.get("config") or {}) if isinstance(entry, Mapping) else {}
        if kind in BUILT_IN and kind != PLAIN:
            roles[name] = given.get("role", "tool")
    return roles


def running_code(config: Config) -> set[str]:
    """Return the names of the configured environments that run a model's code in the sandbox."""
    settings = settings_of(config)
    return {name for name, entry in settings.environments.items() if _runs_code(entry, settings)}


def settings_without_effect(config: Config) -> list[str]:
    """Return a message for each tool of verl's whose entry sets what has no effect here, with the way out."""
    settings, sandbox = settings_of(config), config.actor_rollout_ref.rollout.multi_turn.sandbox
    messages: list[str] = []
    for entry in settings.environments.values():
        for tool in _tools(entry, settings):
            name, given = str(tool.get("class_name")), tool.get("config") or {}
            if "mcp" in tool and given:
                messages.append(f"{name}: beside mcp its config has no effect; timeout and others stand in mcp")
            ignored = without_effect(name, given)
            if ignored:
                messages.append(f"{name} is the built-in tool {ALIASES[name]}; no effect have {', '.join(ignored)}")
            if given.get("sandbox_fusion_url") and "sandbox_fusion_url" in ignored and sandbox.kind != "remote":
                messages.append(
                    f"{name}: its code runs with actor_rollout_ref.rollout.multi_turn.sandbox.kind={sandbox.kind}, not "
                    f"on {given['sandbox_fusion_url']}; set sandbox.kind=remote and sandbox.url for that"
                )
    return list(dict.fromkeys(messages))


def _runs_code(entry: Any, settings: EnvironmentSettings) -> bool:
    kind = entry.get("class") if isinstance(entry, Mapping) else entry
    names = [str(tool.get("class_name")) for tool in _tools(entry, settings)]
    return kind == "code_interpreter" or any(ALIASES.get(name, name) == "python" for name in names)


def _tools(entry: Any, settings: EnvironmentSettings) -> list[Mapping[str, Any]]:
    """Return the entries of the tools of an environment `tools`; of another one none."""
    if (entry.get("class") if isinstance(entry, Mapping) else entry) != "tools":
        return []
    given = (entry.get("config") or {}) if isinstance(entry, Mapping) else {}
    tools: Sequence[Any] = given.get("tools") or ()
    file = given.get("tool_config_path", settings.tool_config_path)
    if not tools and file is not None:
        tools = read_tool_file(file)
    return [tool if isinstance(tool, Mapping) else {"class_name": tool} for tool in tools]


def make_kind(name: str, settings: EnvironmentSettings, sandbox: SandboxConfig) -> EnvironmentKind:
    """Return a kind for a tool process; all kinds of a process share its environments and its sandbox."""
    key = repr((settings, sandbox))
    if key not in _SHARED:
        _SHARED[key] = _Shared(settings, sandbox)
    shared = _SHARED[key]
    return _Closing(shared.environments.kind(None if name == PLAIN else name), shared)


@final
class _Shared:
    """What the kinds of a process have in common."""

    def __init__(self, settings: EnvironmentSettings, sandbox: SandboxConfig) -> None:
        self.runner = LazyRunner(sandbox)
        self.environments = Environments(settings, self.runner)


_SHARED: dict[str, _Shared] = {}  # by the settings they are made of; one in a tool process


@final
class LazyRunner:
    """A code runner that starts with its first session: processes whose rows run no code have no sandbox."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._runner: CodeRunner | None = None

    def session(self, images: Sequence[bytes] = ()) -> CodeSession:
        """Return a new interpreter; see `CodeRunner`."""
        with self._lock:
            if self._runner is None:
                self._runner = make_runner(self._config)
        return self._runner.session(images)

    def close(self) -> None:
        """End all sessions and the warm processes; a later session starts anew."""
        with self._lock:
            runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()


@final
class _Closing:
    """A kind whose end is the end of the process's sandbox, too: kinds are closed together."""

    def __init__(self, kind: EnvironmentKind, shared: _Shared) -> None:
        self._kind = kind
        self._shared = shared

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return self._kind.schemas

    def start(self, prompt: Prompt) -> Environment:
        return self._kind.start(prompt)

    def close(self) -> None:
        self._kind.close()
        self._shared.runner.close()
