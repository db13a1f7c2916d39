"""Cells of an `images` column to encoded bytes, for `prompts` and the converters. Nothing is decoded here."""

import base64
import binascii
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vrl.protocol.errors import DataError


def is_missing(cell: Any) -> bool:
    """Tell whether a cell says "no value": None, NaN, or empty text, bytes, list or dict."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return True
    return isinstance(cell, str | bytes | list | tuple | Mapping) and len(cell) == 0


def image_cells(cell: Any) -> list[Any]:
    """Return the images of a cell as a list: a missing cell has none, a single image is a list of one."""
    if is_missing(cell):
        return []
    return list(cell) if isinstance(cell, list | tuple) else [cell]


def read_image(cell: Any, folder: Path) -> bytes:
    """Return the encoded bytes of one image: bytes, a path, a data URI, or a dict with `bytes`, `path` or `image`.

    Paths are taken from `folder` unless they are absolute.

    Raises:
        DataError: the cell is none of these, or the file cannot be read.
    """
    if isinstance(cell, bytes) and cell:
        return cell
    if isinstance(cell, str) and cell:
        return _read_text(cell, folder)
    if isinstance(cell, Mapping):
        for key in ("bytes", "path", "image"):
            if not is_missing(cell.get(key)):
                return read_image(cell[key], folder)
        raise DataError(f"an image with neither bytes nor path (keys: {', '.join(map(str, cell)) or 'none'})")
    raise DataError(f"an image given as {type(cell).__name__}; give bytes, a path, or a dict with bytes or path")


def _read_text(text: str, folder: Path) -> bytes:
    if text.startswith("data:"):
        try:
            return base64.b64decode(text.partition("base64,")[2], validate=True)
        except binascii.Error as error:
            raise DataError(f"an image data URI that is not base64 ({error})") from error
    if text.startswith(("http://", "https://")):
        raise DataError(f"image {text} is a web address; download it and give a path or bytes")
    path = folder / text.removeprefix("file://")
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"image {path!s:.200} cannot be read ({error.strerror})") from error
    except ValueError as error:  # a null byte: encoded data in a text column
        raise DataError(f"image {text!r:.40} is no path ({error}); store encoded images as bytes") from error
