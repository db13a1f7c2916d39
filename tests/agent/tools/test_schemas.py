"""Schemas as users' tools read them."""

from pathlib import Path

import pytest

from vrl.agent.tools.configured import build_tools
from vrl.agent.tools.schemas import SchemaView
from vrl.agent.tools.types import ToolResources, function_schema

TOOLS = """
SCHEMA = {"type": "function", "function": {"name": "own", "parameters": {"type": "object", "properties": {}}}}

class Attributes:
    def __init__(self, config, tool_schema):
        self.name = tool_schema.function.name
    def execute(self, instance_id, parameters):
        return self.name

class OfClass(Attributes):
    tool_schema = SCHEMA
    def __init__(self, config, tool_schema=None):
        pass

class ByMethod(Attributes):
    def __init__(self, config, tool_schema=None):
        pass
    def get_openai_tool_schema(self):
        return SCHEMA
"""


@pytest.mark.parametrize("name", ["Attributes", "OfClass", "ByMethod"])
def test_schemas_come_from_wherever_verl_takes_them(tmp_path: Path, name: str) -> None:
    (tmp_path / "own_tools.py").write_text(TOOLS)
    entry = {"class_name": f"{tmp_path / 'own_tools.py'}:{name}"}
    if name == "Attributes":
        entry["tool_schema"] = function_schema("own", "", {})
    (tool,) = build_tools([entry], ToolResources(), "tools")
    assert tool.schema["function"]["name"] == "own"


def test_a_view_is_a_mapping_with_attributes() -> None:
    view = SchemaView(function_schema("own", "says", {}))
    assert view.function.name == view["function"]["name"] == "own"
    assert view.model_dump() == view
    assert not hasattr(view, "missing")
