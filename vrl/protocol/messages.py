"""Where images stand in chat messages that answer a model turn. For renderer and turn loop. Torch-free."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vrl.protocol.errors import DataError
from vrl.protocol.trajectory import IMAGE_MARK

_IMAGE_PARTS = ("image", "image_url")


def placed_images(messages: Sequence[Mapping[str, Any]], images: int) -> list[Mapping[str, Any]]:
    """Return the messages with typed parts where the first `images` marks stand; further marks are text.

    Raises:
        DataError: fewer marks and image parts than images, or more image parts.
    """
    left = images
    out: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and left and IMAGE_MARK in content:
            first, *further = content.split(IMAGE_MARK, left)
            left -= len(further)
            parts = [first, *(part for text in further for part in (None, text))]
            content = [_text(part) if part is not None else {"type": "image"} for part in parts if part != ""]
        elif content is not None and not isinstance(content, str):
            left -= sum(part.get("type") in _IMAGE_PARTS for part in content)
        out.append({**message, "content": content})
    if left:
        raise DataError(
            f"an observation brings {images} images but has places for {images - left}: one {IMAGE_MARK} in a text, or "
            "one image part, is wanted for each"
        )
    return out


def replaced_images(messages: Sequence[Mapping[str, Any]], texts: Mapping[int, str]) -> list[Mapping[str, Any]]:
    """Return messages from `placed_images` with a text in the place of each image whose number `texts` holds."""
    numbers = iter(range(1 << 30))

    def parts(content: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        for part in content:
            text = texts.get(next(numbers)) if part.get("type") in _IMAGE_PARTS else None
            yield part if text is None else _text(text)

    return [
        message
        if isinstance(message["content"], str | None)
        else {**message, "content": list(parts(message["content"]))}
        for message in messages
    ]


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
