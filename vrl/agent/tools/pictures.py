"""Images between bytes and pixels for tools: upright RGB in, PNG out, within the limits."""

import io
import math
import struct
from typing import Any, Final

from PIL import Image, ImageOps

from vrl.agent.tools.types import ImageLimits

_MOST_PIXELS: Final = 80_000_000  # to be opened: some 1/4 GB as RGB
_ERRORS: Final = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


class PictureError(ValueError):
    """An image that cannot be shown; the message tells the model or the log why."""


def open_picture(data: bytes) -> Image.Image:
    """Return an encoded image as RGB, upright, on white where it is transparent: as the policy's model sees it.

    Raises PictureError when the bytes are no readable image.
    """
    try:
        with Image.open(io.BytesIO(data)) as opened:
            if opened.width * opened.height > _MOST_PIXELS:
                raise PictureError(
                    f"an image of {opened.width} x {opened.height} pixels is too large to be opened: at most "
                    f"{_MOST_PIXELS} pixels are"
                )
            opened.load()
            return _as_rgb(ImageOps.exif_transpose(opened))
    except PictureError:
        raise
    except _ERRORS as error:
        raise PictureError(f"an image of {len(data)} bytes cannot be read: {error}") from error


def as_png(image: Image.Image) -> bytes:
    """Return the image as an RGB PNG."""
    buffer = io.BytesIO()
    _as_rgb(image).save(buffer, format="PNG")
    return buffer.getvalue()


def encoded(image: Any) -> bytes:
    """Return what a user's tool calls an image, a PIL image or encoded bytes, as bytes of a whole image.

    Raises PictureError for everything else.
    """
    if isinstance(image, Image.Image):
        return as_png(image)
    if isinstance(image, bytes):
        opened = open_picture(image)
        return image if image.startswith((b"\x89PNG", b"\xff\xd8")) else as_png(opened)
    raise PictureError(f"an image given as {type(image).__name__}; give a PIL image or PNG or JPEG bytes")


def fitted(image: Image.Image, limits: ImageLimits) -> Image.Image:
    """Return the image resized, its shape kept, until it is within the limits.

    Raises PictureError when it has no pixels or is too long and thin; `max_pixels` wins where limits disagree.
    """
    width, height = image.size
    if min(width, height) < 1 or max(width, height) > limits.max_aspect * min(width, height):
        raise PictureError(
            f"an image of {width} x {height} pixels cannot be shown: one side may be at most "
            f"{limits.max_aspect:g} times the other"
        )
    scale = max(1.0, limits.min_side / min(width, height), math.sqrt(limits.min_pixels / (width * height)))
    scale = min(scale, math.sqrt(limits.max_pixels / (width * height)))
    if scale == 1.0:
        return image
    rounded = math.ceil if scale > 1.0 else math.floor
    size = max(1, rounded(width * scale)), max(1, rounded(height * scale))
    return image.resize(size, Image.Resampling.BICUBIC)


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
