"""Prompts, images and calls for tests of tools and environments."""

import io
import json
from typing import Any

import numpy as np
from PIL import Image

from vrl.agent.environments.types import StepResult
from vrl.protocol.trajectory import Prompt


def png(width: int, height: int, color: str = "white") -> bytes:
    """An image whose every pixel is different: red counts columns, green rows, blue is the colour's."""
    pixels = np.asarray(Image.new("RGB", (width, height), color)).copy()
    pixels[..., 0] = np.arange(width)[None, :] % 256
    pixels[..., 1] = np.arange(height)[:, None] % 256
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def prompt(*images: bytes, env_name: str | None = None, **tools_kwargs: Any) -> Prompt:
    content = "<image>" * len(images) + "What is it?"
    return Prompt(
        row_id="0",
        uid="0",
        messages=({"role": "user", "content": content},),
        images=images,
        env_name=env_name,
        tools_kwargs=tools_kwargs,
    )


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def texts(result: StepResult) -> list[str]:
    assert result.observation is not None
    return [message["content"] for message in result.observation.messages]
