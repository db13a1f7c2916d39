"""A small MCP server for tests: `python mcp_server.py stdio` or `python mcp_server.py PORT`."""

import io
import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from PIL import Image as Pictures

server = MCPServer("tests")
counts = {"calls": 0}


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def count() -> str:
    """Say how many calls this process has seen, and who it is."""
    counts["calls"] += 1
    return f"{counts['calls']} {os.getpid()}"


@server.tool()
def draw(side: int) -> Image:
    """Draw a red square."""
    buffer = io.BytesIO()
    Pictures.new("RGB", (side, side), "red").save(buffer, "PNG")
    return Image(data=buffer.getvalue(), format="png")


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("it does not work")


@server.tool()
def sleep(seconds: float) -> str:
    """Take some time."""
    counts["calls"] += 1
    time.sleep(seconds)
    return "awake"


@server.tool()
def leave() -> str:
    """End the whole server."""
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
