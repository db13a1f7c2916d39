"""One runner for all tests, with short limits; what needs bubblewrap is skipped where there is none."""

import io
import shutil
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import PIL.Image
import pytest

from vrl.agent.sandbox.local import LocalRunner
from vrl.protocol.config.sandbox import SandboxConfig

SHORT = SandboxConfig(cell_seconds=1.0, memory_mib=256, processes=24, file_mib=16, output_chars=2000, pool_size=2)


def odd_images() -> list[bytes]:
    """Image files that look otherwise than their pixels: turned, of printing colours, transparent."""
    turned = PIL.Image.Exif()
    turned[0x0112] = 6
    palette = PIL.Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    kinds: list[tuple[PIL.Image.Image, str, dict[str, Any]]] = [
        (PIL.Image.new("RGB", (30, 20), "red"), "JPEG", {"exif": turned}),
        (PIL.Image.new("CMYK", (30, 20), (10, 200, 0, 0)), "JPEG", {}),
        (PIL.Image.new("RGBA", (5, 4), (0, 0, 255, 100)), "PNG", {}),
        (palette, "PNG", {"transparency": 1}),
    ]
    files: list[bytes] = []
    for image, kind, settings in kinds:
        file = io.BytesIO()
        image.save(file, kind, **settings)
        files.append(file.getvalue())
    return files


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
