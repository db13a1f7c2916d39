"""Tests in this folder need a CUDA device and are skipped with the reason where there is none."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
