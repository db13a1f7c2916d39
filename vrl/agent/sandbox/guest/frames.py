"""Frames on the channel between the tool process and one interpreter: two lengths, a JSON header, raw bytes.

Nothing is ever unpickled. The tool process reads with strict bounds, since the code of a cell can write to the channel.
"""

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any, final

_LENGTHS = struct.Struct("<II")


class FrameError(ValueError):
    """What arrived is no frame within the bounds."""


def encode_frame(header: dict[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """Return the frame of a header, which gets the sizes of `blobs`, and the blobs."""
    encoded = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    return b"".join([_LENGTHS.pack(len(encoded), sum(map(len, blobs))), encoded, *blobs])


@final
class FrameReader:
    """Collects one frame as its bytes come; bounds are checked before anything is kept."""

    def __init__(self, max_header_bytes: int, max_blob_bytes: int) -> None:
        self._limits = (max_header_bytes, max_blob_bytes)
        self._data = bytearray()
        self._lengths: tuple[int, int] | None = None

    @property
    def wanted(self) -> int:
        """Bytes still missing, as far as is known."""
        if self._lengths is None:
            return _LENGTHS.size - len(self._data)
        return _LENGTHS.size + sum(self._lengths) - len(self._data)

    def feed(self, data: bytes) -> tuple[dict[str, Any], list[bytes]] | None:
        """Add at most `wanted` bytes; return the frame once it is complete. Raises FrameError when it is none."""
        self._data += data
        if self._lengths is None and len(self._data) >= _LENGTHS.size:
            header_bytes, blob_bytes = _LENGTHS.unpack_from(self._data)
            if header_bytes > self._limits[0] or blob_bytes > self._limits[1]:
                raise FrameError(f"a frame of {header_bytes} + {blob_bytes} bytes")
            self._lengths = (header_bytes, blob_bytes)
        return None if self._lengths is None or self.wanted else self._decode(*self._lengths)

    def _decode(self, header_bytes: int, blob_bytes: int) -> tuple[dict[str, Any], list[bytes]]:
        start = _LENGTHS.size + header_bytes
        try:
            header = json.loads(self._data[_LENGTHS.size : start])
        except (ValueError, RecursionError) as error:
            raise FrameError("a header that is no JSON") from error
        sizes = header.get("blobs") if isinstance(header, dict) else None
        if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
            raise FrameError("a header without sizes")
        if sum(sizes) != blob_bytes:
            raise FrameError("sizes that do not add up")
        blobs: list[bytes] = []
        for size in sizes:
            blobs.append(bytes(self._data[start : start + size]))
            start += size
        return header, blobs


def read_frame(connection: socket.socket, reader: FrameReader) -> tuple[dict[str, Any], list[bytes]] | None:
    """Wait for one frame; None when the other end is gone."""
    while True:
        data = connection.recv(min(reader.wanted, 1 << 18))
        if not data:
            return None
        frame = reader.feed(data)
        if frame is not None:
            return frame
