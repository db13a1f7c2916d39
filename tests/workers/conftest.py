"""Tiny model folders and a group of one rank for the tests of the workers."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.workers.rig import build_tiny, free_port, place_of
from vrl.workers import process


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


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Let this process be the only rank of a group."""
    before = dict(os.environ)
    process.start(place_of(0, 1, free_port()))
    yield
    process.stop()
    os.environ.clear()
    os.environ.update(before)
