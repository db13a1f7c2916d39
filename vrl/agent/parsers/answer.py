"""The `<answer>` tag."""

from typing import Final

from vrl.agent.parsers.thinking import without_thoughts

OPEN: Final = "<answer>"
CLOSE: Final = "</answer>"


def last_answer(text: str) -> str | None:
    """Return the inside of the last closed `<answer>` outside thoughts, without outer space; None when there is none.

    Pass the `content` of a parsed turn, so that a tag inside the arguments of a call is not taken for an answer.
    """
    before, closed, _ = without_thoughts(text).rpartition(CLOSE)
    _, opened, inside = before.rpartition(OPEN)
    return inside.strip() if closed and opened else None
