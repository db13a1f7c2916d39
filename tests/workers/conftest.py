"""Tiny model folders for the tests of the workers."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workers.rig import build_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a tiny model by its kind."""
    root = tmp_path_factory.mktemp("tiny")
    built: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in built:
            built[kind] = build_tiny(kind, root)
        return built[kind]

    return folder
