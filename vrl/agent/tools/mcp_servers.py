"""Tools of MCP servers, over stdio or HTTP: one client session a server and process, in a background thread.

The tools are asked for when the process starts. A call that the server refuses, that fails in its tool or takes too
long is an answer for the model; a connection that is lost is opened once more, then the episode fails.
"""

import asyncio
import base64
import binascii
import json
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, final

import anyio
import httpx2
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, CallToolResult

from vrl.agent.tools.event_loop import EventLoopThread
from vrl.agent.tools.pictures import PictureError, encoded
from vrl.agent.tools.schemas import checked_schema
from vrl.agent.tools.types import StatelessTool, ToolAnswer, ToolFailure, failed
from vrl.protocol.errors import ConfigError
from vrl.protocol.trajectory import Prompt

_START_SECONDS: Final = 60.0
_CALL_SECONDS: Final = 60.0
_LOST: Final = (  # what a dead transport raises
    *(OSError, EOFError, httpx2.HTTPError),
    *(anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream),
)


def mcp_tools(settings: Mapping[str, Any], key: str) -> list[StatelessTool]:
    """Connect to the servers of an `mcp` entry and return their tools.

    The entry has `servers` (name -> `{command, args, env, cwd}` or `{url, headers, auth_token}`) or, as in verl,
    `mcp_servers_config_path`, a JSON file with `mcpServers`; `tool_selected_list` (names; all by default) and `timeout`
    (seconds a call, 60 by default). Raises ConfigError that begins with `key` when a server or a chosen tool is
    missing.
    """
    servers = _servers(settings, key)
    chosen = settings.get("tool_selected_list")
    timeout = float(settings.get("timeout", _CALL_SECONDS))
    tools: list[StatelessTool] = []
    for name, server in servers.items():
        connection = McpConnection(f"{key}.{name}", server)
        try:
            tools += connection.tools(chosen, timeout)
        except BaseException:
            connection.close()
            raise
    missing = set(chosen or ()) - {tool.schema["function"]["name"] for tool in tools}
    if missing:
        for tool in tools:
            tool.close()
        raise ConfigError(f"{key}.tool_selected_list: no server has the tools {', '.join(sorted(missing))}")
    return tools


@final
class McpConnection:
    """A session with one server. Its methods are called from any thread."""

    def __init__(self, key: str, server: Mapping[str, Any]) -> None:
        self._key = key
        self._server = server
        self._loop = EventLoopThread(f"mcp-{key}")
        self._client: Client | None = None
        self._closed = False
        self._opening = asyncio.Lock()
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def tools(self, chosen: Any, timeout_seconds: float) -> list[StatelessTool]:
        """Connect and return the server's tools, or those of them that are chosen."""
        try:
            listed = self._loop.run(asyncio.wait_for(self._list(), _START_SECONDS))
        except (MCPError, TimeoutError, ExceptionGroup, ValueError, RuntimeError, *_LOST) as error:
            raise ConfigError(f"{self._key}: the MCP server cannot be reached: {_cause(error)}") from error
        tools = []
        for tool in listed:
            if chosen and tool.name not in chosen:
                continue
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            schema = checked_schema({"type": "function", "function": function}, self._key)
            tools.append(StatelessTool(schema, self._caller(tool.name, timeout_seconds), self.close))
        return tools

    def close(self) -> None:
        """End the session, and the server where it is a child process."""
        if not self._closed:
            self._closed = True
            self._loop.run(self._disconnect(self._client))
            self._loop.close()

    def _caller(self, name: str, timeout_seconds: float) -> Callable[[Prompt, Mapping[str, Any]], Future[ToolAnswer]]:
        def call(_prompt: Prompt, arguments: Mapping[str, Any]) -> Future[ToolAnswer]:
            return self._loop.submit(self._answer(name, dict(arguments), timeout_seconds))

        return call

    async def _answer(self, name: str, arguments: dict[str, Any], timeout_seconds: float) -> ToolAnswer:
        """Carry out one call. Raises ToolFailure when the server is gone and does not come back."""
        lost: BaseException | None = None
        for _attempt in range(2):
            client = None
            try:
                client = await asyncio.wait_for(self._connected(), _START_SECONDS)
                return read_result(await asyncio.wait_for(client.call_tool(name, arguments), timeout_seconds))
            except TimeoutError as error:
                if client is None:
                    raise ToolFailure(f"{self._key}: the MCP server does not start") from error
                return failed(f"the tool {name} took longer than {timeout_seconds:g} seconds")
            except MCPError as error:
                if error.error.code != CONNECTION_CLOSED:
                    return failed(f"the tool {name} failed: {error}")
                lost = error
            except (RuntimeError, ValueError) as error:  # an answer that breaks the server's own schema
                return failed(f"the tool {name} failed: {error}")
            except (ExceptionGroup, *_LOST) as error:
                lost = error
            await self._disconnect(client)
        assert lost is not None
        raise ToolFailure(f"{self._key}: the MCP server is gone: {_cause(lost)}") from lost

    async def _list(self) -> list[Any]:
        client = await self._connected()
        tools, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools

    async def _connected(self) -> Client:
        """Return the client. A task of its own opens and closes it: anyio wants both in one task."""
        async with self._opening:
            if self._client is None:
                ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
                self._ended = asyncio.Event()
                self._task = asyncio.create_task(self._hold(ready))
                self._client = await ready
            return self._client

    async def _hold(self, ready: "asyncio.Future[Client]") -> None:
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._new_client(stack))
                ready.set_result(client)
                await self._ended.wait()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - handed to whoever waits for the client
            if not ready.done():
                ready.set_exception(error if isinstance(error, Exception) else ConnectionError("cancelled"))

    async def _disconnect(self, client: Client | None) -> None:
        """End this client's session, unless another call has opened a new one since."""
        if client is not self._client:
            return
        task, self._client, self._task = self._task, None, None
        self._ended.set()
        if task is not None:
            await asyncio.wait([task], timeout=_START_SECONDS / 2)

    async def _new_client(self, stack: AsyncExitStack) -> Client:
        server = self._server
        if "command" in server:
            parameters = StdioServerParameters(
                command=server["command"],
                args=[str(argument) for argument in server.get("args", ())],
                env={str(key): str(value) for key, value in (server.get("env") or {}).items()},
                cwd=server.get("cwd"),
            )
            return Client(stdio_client(parameters, errlog=sys.stderr))
        headers = dict(server.get("headers") or {})
        if server.get("auth_token"):
            headers["Authorization"] = f"Bearer {server['auth_token']}"
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=_START_SECONDS))
        return Client(streamable_http_client(server["url"], http_client=http))


def _servers(settings: Mapping[str, Any], key: str) -> dict[str, Mapping[str, Any]]:
    path = settings.get("mcp_servers_config_path")
    servers = settings.get("servers")
    if path is not None:
        try:
            servers = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))["mcpServers"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{key}.mcp_servers_config_path={path}: {error!r} while reading mcpServers") from error
    if not isinstance(servers, Mapping) or not servers:
        raise ConfigError(f"{key}: give servers, or mcp_servers_config_path with a JSON file that has mcpServers")
    for name, server in servers.items():
        if not isinstance(server, Mapping) or ("command" in server) == ("url" in server):
            raise ConfigError(f"{key}.servers.{name}: give either command (and args) or url")
    return {str(name): server for name, server in servers.items()}


def read_result(result: CallToolResult) -> ToolAnswer:
    """Return a server's answer: texts joined by newlines, images, and a note in place of all else."""
    texts: list[str] = []
    images: list[bytes] = []
    for block in result.content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "image":
            try:
                images.append(encoded(base64.b64decode(block.data, validate=True)))
            except (PictureError, binascii.Error) as error:
                texts.append(f"(an image was left out: {error})")
        else:
            texts.append(f"(content of type {block.type} was left out)")
    text = "\n".join(texts)
    return failed(text) if result.is_error else ToolAnswer(text=text, images=tuple(images))


def _cause(error: BaseException) -> str:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
