"""The bar inside long stages, and lines that do not break it. Used by all of controller/ that talks to a person."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, final

from tqdm import tqdm

_SECONDS_BETWEEN_DRAWS = 0.2


@final
class Progress:
    """A running bar."""

    def __init__(self, bar: "tqdm[Any]") -> None:
        self._bar = bar

    def advance(self, count: int = 1, note: str = "") -> None:
        """Move on by `count` units; `note` stands behind the bar until the next one."""
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(count)


@contextmanager
def stage(title: str, total: int | None, stream: TextIO | None = None) -> Iterator[Progress]:
    """Show a bar of `total` units (None: unknown) while the block runs; it vanishes afterwards.

    Only a terminal sees it: nothing is written to files and pipes. `stream` is the standard error stream by default.
    """
    bar: tqdm[Any] = tqdm(
        total=total,
        desc=title,
        file=stream,
        disable=None,  # where the stream is no terminal
        leave=False,
        dynamic_ncols=True,
        mininterval=_SECONDS_BETWEEN_DRAWS,
    )
    with bar:
        yield Progress(bar)


def write_line(text: str, stream: TextIO) -> None:
    """Write a line to the console above a bar that may be there."""
    tqdm.write(text, file=stream)
    stream.flush()
