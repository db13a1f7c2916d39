"""Tiny models with random weights, and images, for the tests of `vrl.models`."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vrl.models.tiny import build_tiny_model

_TEXTS = ["what colour is the cell", "the answer is red", "count the blue cells of the grid", "look at the image"]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("qwen2", tmp_path_factory.mktemp("qwen2"), _TEXTS, seed=1)


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"), _TEXTS, seed=2)


@pytest.fixture(scope="session")
def png() -> Callable[..., bytes]:
    """Return a function that makes a PNG of random colours: `png(height, width, seed)`."""

    def make(height: int, width: int, seed: int = 0) -> bytes:
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "PNG")
        return out.getvalue()

    return make
