"""A server whose answers are no whole HTTP, for the tests of clients."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

BROKEN = (
    b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n400\r\n{"a":1',  # ends within a piece
    b"\x16\x03\x01garbage\r\n\r\n",  # no status
    b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"a":1',  # ends too early
    b"",
)


@contextmanager
def broken_server(answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the address of a server that answers so, and what it was asked."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # closed
                    return
                with connection:
                    asked.append(_request(connection))
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", asked
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


def _request(connection: socket.socket) -> bytes:
    """Read one whole request: what is left unread would reset the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)
    return body
