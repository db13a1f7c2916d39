"""The environments of a run's settings in real tool processes, and which of them run code."""

import shutil
import time

import pytest

from tests.workers.rig import png
from vrl.agent.environments.configured import (
    environment_spec,
    running_code,
    settings_without_effect,
    with_built_in,
)
from vrl.agent.environments.pool import EnvironmentPool
from vrl.protocol.config.builder import build
from vrl.protocol.config.schema import Config
from vrl.protocol.trajectory import Prompt

ENTRIES = {
    "python": {"class": "code_interpreter"},
    "zoom": {"class": "tools", "config": {"tools": ["image_zoom_in_tool"], "show_schemas": False}},
    "both": {"class": "tools", "config": {"tools": ["calculator", {"class_name": "python"}]}},
}
CALL = '<tool_call>{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [0, 0, 30, 30]}}</tool_call>'


def config(entries: object = None, **sandbox: str) -> Config:
    agent = {"environments": ENTRIES if entries is None else entries, "max_turns": 3}
    return build({"actor_rollout_ref": {"rollout": {"agent": agent, "multi_turn": {"sandbox": sandbox}}}})


def row(env_name: str, *images: bytes) -> Prompt:
    return Prompt(row_id=env_name, uid=env_name, messages=[], images=images, env_name=env_name)


def test_what_rows_use_gets_an_entry_and_code_is_known_by_its_tools() -> None:
    assert running_code(config()) == {"python", "both"}
    completed = with_built_in(config({}), {"code_interpreter", "image_tools", "elsewhere"})
    assert set(completed.actor_rollout_ref.rollout.agent.environments) == {"code_interpreter", "image_tools"}
    assert running_code(completed) == {"code_interpreter"}
    assert environment_spec(config({})).kinds == {}


def test_a_tool_of_verls_that_runs_code_is_known() -> None:
    name, url = "verl.tools.sandbox_fusion_tools.SandboxFusionTool", "http://fusion:8080/run_code"
    entry = {"class_name": name, "config": {"sandbox_fusion_url": url, "num_workers": 10, "type": "native"}}
    entries = {"verl": {"class": "tools", "config": {"tools": [entry]}}}
    assert running_code(config(entries)) == {"verl"}
    ignored, elsewhere = settings_without_effect(config(entries))
    assert ignored == f"{name} is the built-in tool python; no effect have num_workers, sandbox_fusion_url, type"
    assert f"sandbox.kind=local, not on {url}; set sandbox.kind=remote and sandbox.url" in elsewhere
    assert settings_without_effect(config(entries, kind="remote", url=url)) == [ignored]
    assert settings_without_effect(config()) == []
    beside = {
        "class_name": "verl.tools.mcp_search_tool.MCPSearchTool",
        "config": {"timeout": 9},
        "mcp": {"servers": {}},
    }
    said = settings_without_effect(config({"verl": {"class": "tools", "config": {"tools": [beside]}}}))
    assert said == [f"{beside['class_name']}: beside mcp its config has no effect; timeout and others stand in mcp"]


def test_tool_processes_load_them_and_keep_variables_from_cell_to_cell() -> None:
    with EnvironmentPool(1, environment_spec(config())) as pool:
        assert pool.schemas["zoom"] == []
        assert [schema["function"]["name"] for schema in pool.schemas["both"]] == ["calculator", "python"]
        zoom = pool.start(row("zoom", png(60, 90, 1)))
        assert len(answer(pool, zoom, CALL).images) == 1
        if shutil.which("bwrap") is None:
            pytest.skip("bubblewrap is not installed")
        cells = pool.start(row("python", png(60, 90, 1)))
        answer(pool, cells, "```python\nx = image_1.size[0]\n```")
        assert "91" in str(answer(pool, cells, "```python\nprint(x + 1)\n```").messages)


def answer(pool: EnvironmentPool, episode: int, text: str):
    pending = pool.step(episode, text)
    deadline = time.monotonic() + 60
    while not pending.done():
        assert time.monotonic() < deadline
        pool.poll(0.1)
    assert pending.outcome.result is not None, pending.outcome.failure
    assert pending.outcome.result.observation is not None
    return pending.outcome.result.observation
