"""One runner for all tests, with short limits; what needs bubblewrap is skipped where there is none."""

import shutil
import socket
import subprocess
from collections.abc import Iterator

import pytest

from vrl.agent.sandbox.local import LocalRunner
from vrl.protocol.config.sandbox import SandboxConfig

SHORT = SandboxConfig(cell_seconds=1.0, memory_mib=256, processes=24, file_mib=16, output_chars=2000, pool_size=2)


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    """Asked without any of our code, so that nothing that we break is skipped."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: apt-get install bubblewrap")
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.skip(f"bubblewrap may make no namespaces here: {result.stderr.strip()}")


@pytest.fixture(scope="session")
def runner(bubblewrap: None) -> Iterator[LocalRunner]:
    with LocalRunner(SHORT) as made:
        yield made


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    """A port of this machine that somebody listens on, as Ray and engines do."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server
