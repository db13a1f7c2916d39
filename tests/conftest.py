"""What every test process starts from: one thread a process, no network, and the mark `gpu` for tests/gpu.

vrl is not imported here, so that the jaxtyping hook of the unit tier can still be installed.
"""

import os
from pathlib import Path

import pytest

# Before torch is imported anywhere: spinning threads on two cores make tests up to 20 times slower.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
}.items():
    os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Right values from public implementations."""
    return Path(__file__).parent / "golden"


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent / "gpu"
    for item in items:
        if folder in item.path.parents:
            item.add_marker("gpu")
