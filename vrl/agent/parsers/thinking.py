"""Where a model thinks: `<think>...</think>`, and text before a `</think>` that the prompt had opened."""

from typing import Final, final

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


@final
class Thoughts:
    """The thoughts of one text. What follows a `<think>` that is never closed counts as said.

    A model that forgot to close its thought still means its call.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._last_close = text.rfind(CLOSE)  # known from the start: a search for each tag would be quadratic

    @property
    def start_of_speech(self) -> int:
        """Where the text begins that is not thought: after the first `</think>` that no `<think>` opens, else 0."""
        close = self._text.find(CLOSE)
        if close < 0 or self._text.find(OPEN, 0, close) >= 0:
            return 0
        return close + len(CLOSE)

    def end(self, start: int) -> int | None:
        """Return where the thought that opens at `start` is over; None when it is never closed."""
        if start > self._last_close:
            return None
        return self._text.index(CLOSE, start) + len(CLOSE)


def without_thoughts(text: str) -> str:
    """Return the text without closed thoughts."""
    thoughts, parts = Thoughts(text), []
    position = thoughts.start_of_speech
    while (opened := text.find(OPEN, position)) >= 0:
        end = thoughts.end(opened)
        if end is None:
            break
        parts.append(text[position:opened])
        position = end
    return "".join([*parts, text[position:]])
