"""The tools of a settings file (`actor_rollout_ref.rollout.multi_turn.tool_config_path`) or of a list in the settings.

tools:
  - class_name: calculator                      # built in; a tool_schema renames it
  - class_name: my_tools.py:Weather             # a class of the user, also module:Class or module.Class
    config: {...}
    tool_schema: {type: function, function: {name: ..., description: ..., parameters: {...}}}
  - mcp: {servers: {files: {command: ..., args: [...]}}, tool_selected_list: [...], timeout: 30}
"""

import importlib
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final

import yaml

from vrl.agent.plugins import construct, load_class
from vrl.agent.tools.registry import BUILT_IN_TOOLS, build_tool, is_built_in
from vrl.agent.tools.schemas import SchemaView, checked_schema
from vrl.agent.tools.types import Tool, ToolResources, ToolSession, check_settings
from vrl.agent.tools.user_tools import UserTool
from vrl.protocol.errors import ConfigError
from vrl.protocol.trajectory import Prompt


def read_tool_file(path: str) -> list[Any]:
    """Return the entries of a YAML file. Raises ConfigError when it cannot be read or has no list `tools`."""
    key = f"tool_config_path={path}"
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{key}: {error}") from error
    entries = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{key}: a list `tools` with at least one entry is wanted")
    return entries


def build_tools(entries: Any, resources: ToolResources, key: str) -> tuple[Tool, ...]:
    """Return the tools of a list of entries; an entry that is a text stands for its `class_name`.

    Raises ConfigError that begins with `key` when one cannot be built or two have one name.
    """
    if not isinstance(entries, list | tuple) or not entries:
        raise ConfigError(f"{key}: a list with at least one tool is wanted")
    tools: list[Tool] = []
    with ExitStack() as on_failure:
        for number, entry in enumerate(entries):
            built = _entry_tools(entry, resources, f"{key}[{number}]")
            tools += built
            for tool in built:
                on_failure.callback(tool.close)
        _check_names(tools, key)
        on_failure.pop_all()
    return tuple(tools)


def _check_names(tools: Sequence[Tool], key: str) -> None:
    counts = Counter(tool.schema["function"]["name"] for tool in tools)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ConfigError(f"{key}: there are two tools {', '.join(twice)}; names of tools must differ")


def _entry_tools(entry: Any, resources: ToolResources, key: str) -> list[Tool]:
    entry = {"class_name": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{key}: a mapping with class_name or mcp is wanted")
    check_settings(entry, ("class_name", "config", "tool_schema", "mcp"), f"{key}: a tool")
    if "mcp" in entry:
        mcp_servers = importlib.import_module("vrl.agent.tools.mcp_servers")  # a second; few runs need it
        return list(mcp_servers.mcp_tools(entry["mcp"], f"{key}.mcp"))
    name, config = entry.get("class_name"), dict(entry.get("config") or {})
    if not isinstance(name, str):
        raise ConfigError(f"{key}: class_name is missing; give a class or one of {', '.join(BUILT_IN_TOOLS)}")
    if is_built_in(name):
        try:
            return [_described(build_tool(name, config, resources), entry.get("tool_schema"), key)]
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error
    if ":" not in name and "." not in name:
        raise ConfigError(f"{key}: there is no tool {name!r}; built in are {', '.join(BUILT_IN_TOOLS)}")
    return [_user_tool(name, config, entry.get("tool_schema"), key)]


def _described(tool: Tool, schema: Any, key: str) -> Tool:
    """Return a built-in tool with the name and description that the entry gives it."""
    return tool if schema is None else _Described(tool, checked_schema(schema, key))


@final
class _Described:
    def __init__(self, tool: Tool, schema: Mapping[str, Any]) -> None:
        self._tool = tool
        self.schema = schema

    def start(self, prompt: Prompt, options: Mapping[str, Any]) -> ToolSession:
        return self._tool.start(prompt, options)

    def close(self) -> None:
        self._tool.close()


def _user_tool(name: str, config: dict[str, Any], schema: Any, key: str) -> Tool:
    shown = SchemaView(schema) if isinstance(schema, Mapping) else schema
    tool = construct(load_class(name, f"{key}.class_name"), key, config=config, tool_schema=shown)
    if schema is None:
        schema = inspect.getattr_static(tool, "tool_schema", None)
    if schema is None and inspect.getattr_static(tool, "get_openai_tool_schema", None) is not None:
        schema = tool.get_openai_tool_schema()
    return UserTool(tool, schema, f"{key} ({name})")
