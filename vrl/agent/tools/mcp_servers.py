"""Tools of MCP servers, over stdio or HTTP, in a background thread a server and process.

An episode has a client session of its own with each server that it calls, or all episodes of a process share one (see
`per_episode`). The tools are asked for when the process starts. A call that the server refuses or that fails in its
tool is an answer for the model. A server that hangs fails the episode; its call is not made again. A connection that is
lost is opened once more, then the episode fails.
"""

import asyncio
import base64
import binascii
import json
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack
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
from vrl.agent.tools.types import ToolAnswer, ToolFailure, check_settings, failed
from vrl.protocol.errors import ConfigError
from vrl.protocol.trajectory import Prompt

_START_SECONDS: Final = 60.0
_CALL_SECONDS: Final = 60.0
_SETTINGS: Final = ("servers", "mcp_servers_config_path", "tool_selected_list", "timeout", "per_episode")
_OF_STDIO: Final = ("command", "args", "env", "cwd")
_OF_HTTP: Final = ("url", "headers", "auth_token")
_TELLING: Final = {"type", "transport", "description"}  # what files of other programs say of a server beside that
_LOST: Final = (  # what a dead transport raises
    *(OSError, EOFError, httpx2.HTTPError),
    *(anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream),
)


def mcp_tools(settings: Mapping[str, Any], key: str) -> list["McpTool"]:
    """Connect to the servers of an `mcp` entry and return their tools.

    The entry has `servers` (name -> `{command, args, env, cwd}` or `{url, headers, auth_token}`) or, as in verl,
    `mcp_servers_config_path`, a JSON file with `mcpServers`; `tool_selected_list` (names; all by default), `timeout`
    (seconds a call, 60 by default) and `per_episode`: whether each episode has a session of its own. By default it has
    one over HTTP; over stdio that takes a process each. Raises ConfigError that begins with `key` when a server or a
    chosen tool is missing.
    """
    check_settings(settings, _SETTINGS, f"{key}: an mcp entry")
    servers = _servers(settings, key)
    chosen = settings.get("tool_selected_list")
    timeout = float(settings.get("timeout", _CALL_SECONDS))
    apart = settings.get("per_episode")
    if apart is not None and not isinstance(apart, bool):
        raise ConfigError(f"{key}.per_episode={apart!r}: use true or false")
    tools: list[McpTool] = []
    with ExitStack() as on_failure:
        for name, entry in servers.items():
            server = McpServer(f"{key}.{name}", entry, timeout, "url" in entry if apart is None else apart)
            on_failure.callback(server.close)
            tools += server.tools(chosen)
        missing = set(chosen or ()) - {tool.schema["function"]["name"] for tool in tools}
        if missing:
            raise ConfigError(f"{key}.tool_selected_list: no server has the tools {', '.join(sorted(missing))}")
        on_failure.pop_all()
    return tools


@final
class McpServer:
    """A server and the sessions with it. Its methods are called from any thread."""

    def __init__(self, key: str, server: Mapping[str, Any], timeout_seconds: float, per_episode: bool) -> None:
        self._key = key
        self._per_episode = per_episode
        self._loop = EventLoopThread(f"mcp-{key}")
        self._connect = lambda: McpConnection(key, server, timeout_seconds)
        self._shared = self._connect()
        self._own: dict[int, tuple[McpConnection, int]] = {}  # by the identity of an episode's row; and its sessions
        self._lock = threading.Lock()
        self._closed = False

    def tools(self, chosen: Any) -> list["McpTool"]:
        """Connect and return the server's tools, or those of them that are chosen."""
        try:
            listed = self._loop.run(asyncio.wait_for(self._shared.list_tools(), _START_SECONDS))
            if self._per_episode:
                self._loop.run(self._shared.disconnect())
        except (MCPError, TimeoutError, ExceptionGroup, ValueError, RuntimeError, *_LOST) as error:
            raise ConfigError(f"{self._key}: the MCP server cannot be reached: {_cause(error)}") from error
        tools: list[McpTool] = []
        for tool in listed:
            if chosen and tool.name not in chosen:
                continue
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            schema = checked_schema({"type": "function", "function": function}, self._key)
            tools.append(McpTool(self, tool.name, schema))
        return tools

    def join(self, prompt: Prompt) -> "McpConnection":
        """Return the connection of the episode of this row. All tools of an episode share it, until the last leaves."""
        if not self._per_episode:
            return self._shared
        with self._lock:
            connection, sessions = self._own.get(id(prompt)) or (self._connect(), 0)
            self._own[id(prompt)] = connection, sessions + 1
            return connection

    def leave(self, prompt: Prompt) -> None:
        """Undo one `join`."""
        with self._lock:
            connection, sessions = self._own.pop(id(prompt), (None, 0))
            if connection is not None and sessions > 1:
                self._own[id(prompt)] = connection, sessions - 1
                return
            closed = self._closed
        if connection is not None and not closed:
            self._loop.run(connection.disconnect())

    def call(self, connection: "McpConnection", name: str, arguments: Mapping[str, Any]) -> Future[ToolAnswer]:
        """Begin a call."""
        return self._loop.submit(connection.answer(name, dict(arguments)))

    def close(self) -> None:
        """End all sessions, and the server where it is a child process."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = [self._shared, *(connection for connection, _ in self._own.values())]
            self._own = {}
        self._loop.run(_all_of([connection.disconnect() for connection in connections]))
        self._loop.close()


async def _all_of(endings: Sequence[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*endings)


@final
class McpTool:
    """A tool of a server; closing it closes the server."""

    def __init__(self, server: McpServer, name: str, schema: Mapping[str, Any]) -> None:
        self.schema = schema
        self._server = server
        self._name = name

    def start(self, prompt: Prompt, options: Mapping[str, Any]) -> "McpSession":  # noqa: ARG002 - nothing to set
        """Return what answers one episode's calls; it connects with the first."""
        return McpSession(self._server, self._name, prompt)

    def close(self) -> None:
        """End all sessions with the server."""
        self._server.close()


@final
class McpSession:
    """A tool in one episode."""

    def __init__(self, server: McpServer, name: str, prompt: Prompt) -> None:
        self._server = server
        self._name = name
        self._prompt = prompt
        self._connection: McpConnection | None = server.join(prompt)

    def call(self, arguments: Mapping[str, Any]) -> Future[ToolAnswer]:
        """Begin a call."""
        assert self._connection is not None, "the episode is over"
        return self._server.call(self._connection, self._name, arguments)

    def finish(self) -> float:
        """Return 0: servers give no rewards."""
        return 0.0

    def close(self) -> None:
        """End the episode's connection with the last of its tools."""
        if self._connection is not None:
            self._connection = None
            self._server.leave(self._prompt)


@final
class McpConnection:
    """A client's session with a server, opened when it is first needed. Lives in the loop of its server."""

    def __init__(self, key: str, server: Mapping[str, Any], timeout_seconds: float) -> None:
        self._key = key
        self._server = server
        self._timeout_seconds = timeout_seconds
        self._client: Client | None = None
        self._opening = asyncio.Lock()
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def answer(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        """Carry out one call. Raises ToolFailure when the server hangs, or is gone and does not come back."""
        lost: BaseException | None = None
        for _attempt in range(2):
            client = None
            try:
                client = await asyncio.wait_for(self._connected(), _START_SECONDS)
                return read_result(await asyncio.wait_for(client.call_tool(name, arguments), self._timeout_seconds))
            except TimeoutError as error:
                if client is None:
                    raise ToolFailure(f"{self._key}: the MCP server does not start") from error
                limit = f"{self._timeout_seconds:g} seconds"
                raise ToolFailure(f"{self._key}: the tool {name} took longer than {limit} (timeout)") from error
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

    async def disconnect(self) -> None:
        """End the session, and the server where it is a child process; a later call begins another."""
        await self._disconnect(self._client)

    async def list_tools(self) -> list[Any]:
        """Return all tools that the server has."""
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
        # The limit of a call is kept above; a shorter one down here would have the call made again.
        limits = httpx2.Timeout(_START_SECONDS, read=self._timeout_seconds + _START_SECONDS)
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=limits))
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
        known = _OF_STDIO if "command" in server else _OF_HTTP
        check_settings(set(server) - _TELLING, known, f"{key}.servers.{name}: the server")
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
