"""Built-in tools by name. Their modules are imported on first use: some cost a second to import."""

import importlib
from collections.abc import Mapping
from typing import Any, Final

from vrl.agent.tools.types import Tool, ToolResources

# name -> module and function; the function takes (config, resources) and returns a Tool.
BUILT_IN_TOOLS: Final[Mapping[str, tuple[str, str]]] = {
    "python": ("vrl.agent.tools.interpreter", "interpreter_tool"),
    "image_zoom_in_tool": ("vrl.agent.tools.image_tools", "zoom_tool"),
    "image_rotate_tool": ("vrl.agent.tools.image_tools", "rotate_tool"),
    "calculator": ("vrl.agent.tools.calculator", "calculator_tool"),
    "search": ("vrl.agent.tools.search", "search_tool"),
    "retriever": ("vrl.agent.tools.search", "retriever_tool"),
}

# Names in verl's files for tools that are built in here, and settings there of what vrl does in other ways.
ALIASES: Final[Mapping[str, str]] = {
    "verl.tools.image_zoom_in_tool.ImageZoomInTool": "image_zoom_in_tool",
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": "python",
    "verl.tools.search_tool.SearchTool": "retriever",
}
_OTHER_WAYS: Final = frozenset(
    {"type", "num_workers", "rate_limit", "enable_global_rate_limit", "default_timeout", "default_language"}
    | {"sandbox_fusion_url", "memory_limit_mb"}
)


def is_built_in(name: str) -> bool:
    """Tell whether a name in a settings file means a built-in tool."""
    return ALIASES.get(name, name) in BUILT_IN_TOOLS


def without_effect(name: str, config: Mapping[str, Any]) -> list[str]:
    """Return the settings of an entry of verl's that do something there, and nothing here."""
    if name not in ALIASES:
        return []
    ways = _OTHER_WAYS if ALIASES[name] == "retriever" else _OTHER_WAYS | {"timeout"}
    return sorted(ways & set(config))


def build_tool(name: str, config: Mapping[str, Any], resources: ToolResources) -> Tool:
    """Return a built-in tool. Raises ConfigError when its settings do not do."""
    module, function = BUILT_IN_TOOLS[ALIASES.get(name, name)]
    ignored = without_effect(name, config)
    config = {key: value for key, value in config.items() if key not in ignored}
    return vars(importlib.import_module(module))[function](config, resources)
