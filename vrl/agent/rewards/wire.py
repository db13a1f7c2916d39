"""Frames between a rollout worker and a reward process: four bytes of length, then the payload.

Requests are pickles of our own dataclasses. Answers are JSON: nothing a user's function returns is ever unpickled here.
"""

import socket
import struct
from typing import final

_HEADER = struct.Struct("<I")


def frame(payload: bytes) -> bytes:
    """Return the payload with its length in front."""
    return _HEADER.pack(len(payload)) + payload


def read_frame(connection: socket.socket) -> bytes | None:
    """Wait for one frame and return its payload; None when the other end is gone."""
    header = _read_exactly(connection, _HEADER.size)
    if header is None:
        return None
    return _read_exactly(connection, _HEADER.unpack(header)[0])


def _read_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


@final
class FrameBuffer:
    """Collects bytes as they come and gives out whole frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def has_part(self) -> bool:
        """True while a frame has begun to arrive and is not complete."""
        return bool(self._data)

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the payloads that are now complete."""
        self._data += data
        payloads: list[bytes] = []
        while len(self._data) >= _HEADER.size:
            end = _HEADER.size + _HEADER.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            payloads.append(bytes(self._data[_HEADER.size : end]))
            del self._data[:end]
        return payloads
