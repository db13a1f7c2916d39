"""Tools of a real MCP server over stdio and over HTTP."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.agent.episodes import call, opened, prompt, texts
from vrl.agent.environments.tool_calls import ToolEnvironment, ToolKind, TurnLimits
from vrl.agent.tools import mcp_servers
from vrl.agent.tools.configured import build_tools
from vrl.agent.tools.types import ToolFailure, ToolResources
from vrl.protocol.errors import ConfigError

SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = {"command": sys.executable, "args": [SERVER, "stdio"]}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def http_server() -> Iterator[dict[str, Any]]:
    port = free_port()
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    for _ in range(300):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            break
        time.sleep(0.1)
    yield {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"X-Test": "1"}}
    process.kill()
    process.wait()


def kind_of(server: dict[str, Any], **settings: Any) -> ToolKind:
    entries = [{"mcp": {"servers": {"test": server}, "timeout": 20, **settings}}]
    return ToolKind(build_tools(entries, ToolResources(), "tools"), TurnLimits(max_parallel_calls=3))


def say(environment: ToolEnvironment, text: str) -> str:
    return texts(environment.step(text))[0]


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_tools_of_a_server(transport: str, request: pytest.FixtureRequest) -> None:
    kind = kind_of(STDIO if transport == "stdio" else request.getfixturevalue("http_server"))
    names = [schema["function"]["name"] for schema in kind.schemas]
    assert names == ["add", "count", "draw", "fail", "sleep", "leave"]
    assert kind.schemas[0]["function"]["parameters"]["required"] == ["a", "b"]
    environment = kind.start(prompt())
    other = kind.start(prompt())
    assert say(environment, call("add", a=2, b=40)) == "42"
    assert "'b' is a required property" in say(environment, call("add", a=2))
    assert [say(e, call("count")).split()[0] for e in (environment, other)] == ["1", "2"]  # one process for all
    drawn = environment.step(call("draw", side=30))
    assert drawn.observation is not None
    assert opened(drawn.observation.images[0]).getpixel((3, 3)) == (255, 0, 0)
    assert "it does not work" in say(environment, call("fail"))
    kind.close()


def test_a_server_that_ends_is_started_again_once() -> None:
    kind = kind_of(STDIO, tool_selected_list=["count", "sleep", "leave"], timeout=2)
    assert [schema["function"]["name"] for schema in kind.schemas] == ["count", "sleep", "leave"]
    environment = kind.start(prompt())
    first = say(environment, call("count"))
    with pytest.raises(ToolFailure, match=r"tools\[0\].mcp.test: the tool sleep took longer than 2 seconds"):
        environment.step(call("sleep", seconds=60))  # no mistake of the model
    with pytest.raises(ToolFailure, match=r"tools\[0\].mcp.test: the MCP server is gone"):
        environment.step(call("leave"))  # it ends the second one too
    second = say(environment, call("count"))
    assert first.split()[0] == second.split()[0] == "1"
    assert first != second  # another process
    kind.close()
    kind.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("mcp")]


def test_an_episode_may_have_a_process_of_its_own() -> None:
    kind = kind_of(STDIO, tool_selected_list=["count", "add"], per_episode=True)
    row = prompt()
    one, two = kind.start(row), kind.start(row)
    assert texts(one.step(call("count") + call("add", a=1, b=1) + call("count")))[1:2] == ["2"]
    seen = [say(environment, call("count")).split() for environment in (one, two)]
    assert [number for number, _ in seen] == ["3", "1"]
    assert seen[0][1] != seen[1][1]
    one.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(seen[0][1]), 0)
    assert say(two, call("count")).split() == ["2", seen[1][1]]
    kind.close()
    two.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(seen[1][1]), 0)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("mcp")]


def test_over_http_an_episode_has_a_connection_of_its_own(http_server: dict[str, Any]) -> None:
    port = int(http_server["url"].rpartition(":")[2].partition("/")[0])

    def connections() -> int:
        found = psutil.Process().net_connections("tcp")
        return sum(bool(c.raddr) and c.raddr.port == port and c.status == psutil.CONN_ESTABLISHED for c in found)

    kind = kind_of(http_server)
    one, two = kind.start(prompt()), kind.start(prompt())
    assert connections() == 0
    open_ones = [0]
    for environment in (one, two):
        assert say(environment, call("add", a=1, b=1)) == "2"
        open_ones.append(connections())
    assert open_ones == sorted(set(open_ones)), "each has opened some"
    one.close()
    assert 0 < connections() < open_ones[2]
    two.close()
    assert connections() == 0
    kind.close()


def test_a_long_call_over_http_is_waited_for_and_made_once(
    http_server: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_servers, "_START_SECONDS", 1.5)
    kind = kind_of(http_server)
    environment = kind.start(prompt())
    before = int(say(environment, call("count")).split()[0])
    assert say(environment, call("sleep", seconds=2.5)) == "awake"
    assert int(say(environment, call("count")).split()[0]) == before + 2
    environment.close()
    kind.close()


@pytest.mark.parametrize(
    ("mcp", "message"),
    [
        ({}, "give servers, or mcp_servers_config_path"),
        ({"servers": {"a": {}}}, "servers.a: give either command"),
        ({"servers": {"a": STDIO}, "time_out": 3}, "tools.*mcp: an mcp entry has no setting time_out; it has servers"),
        ({"servers": {"a": {**STDIO, "arg": []}}}, "servers.a: the server has no setting arg; it has command, args"),
        ({"servers": {"a": {"url": "http://x", "env": {}}}}, "servers.a: the server has no setting env; it has url"),
        ({"servers": {"a": {"url": "http://127.0.0.1:9/mcp"}}, "per_episode": 1}, "per_episode=1: use true or false"),
        ({"servers": {"a": {"command": "/no/such/program"}}}, "mcp.a: the MCP server cannot be reached"),
        ({"servers": {"a": {"url": "http://127.0.0.1:9/mcp"}}}, "mcp.a: the MCP server cannot be reached"),
        ({"servers": {"a": {"command": sys.executable, "args": ["-c", "pass"]}}}, "cannot be reached"),
        ({"mcp_servers_config_path": "missing.json"}, "missing.json"),
    ],
)
def test_a_server_that_is_not_there_is_a_bad_setting(mcp: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tools([{"mcp": mcp}], ToolResources(), "tools")


def test_a_tool_that_no_server_has(tmp_path: Path, http_server: dict[str, Any]) -> None:
    config = tmp_path / "servers.json"
    config.write_text(json.dumps({"mcpServers": {"test": http_server}}))
    entry = {"mcp": {"mcp_servers_config_path": str(config), "tool_selected_list": ["add", "multiply"]}}
    with pytest.raises(ConfigError, match="no server has the tools multiply"):
        build_tools([entry], ToolResources(), "tools")
