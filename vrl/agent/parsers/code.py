"""Code that a turn wants to run: fenced blocks marked as Python, and `<code>` tags (DeepEyes v2)."""

import re
from typing import Final

from vrl.agent.parsers.types import MAX_ACTION_CHARACTERS, CodeCell, ParsedTurn, ParseError, TurnBuilder

_PYTHON: Final = frozenset({"python", "py", "python3"})
_START: Final = re.compile(r"<think>|^ {0,3}```([^\n`]*)$", re.MULTILINE)
_FENCE_END: Final = re.compile(r"^ {0,3}```[ \t]*\r?$", re.MULTILINE)
_CODE_START: Final = re.compile(r"<think>|<code>")
_CODE_END: Final = "</code>"
_INNER_FENCE: Final = re.compile(r"\s*```([^\n`]*)\n")


def parse_fenced_code(text: str) -> ParsedTurn:
    """Return the Python cells of a turn in order.

    A fence opens and closes at the start of a line (up to three spaces before it); backticks inside a line belong to
    the code. Blocks of other languages or of none are text.
    """
    turn = TurnBuilder(text, "code block")
    while not turn.full and (start := _START.search(text, turn.position)):
        if start[1] is None:
            turn.skip_thought(start.start())
            continue
        python = start[1].strip().lower() in _PYTHON
        close = _FENCE_END.search(text, start.end() + 1)
        turn.say(start.start())
        if python and close:
            turn.act(_cell(text[start.end() + 1 : close.start()]), close.end())
        elif python:
            message = "The code block is not closed: end it with ``` on a line of its own."
            turn.act(ParseError("unclosed", message), len(text))
        else:
            turn.say(close.end() if close else len(text))
    return turn.build()


def parse_code_tags(text: str) -> ParsedTurn:
    """Return the cells between `<code>` and `</code>`; a fence inside is taken off and lets `</code>` stand in code.

    A whole fenced block at the end of the text needs no closing tag: a stop string may have cut it off.
    """
    turn = TurnBuilder(text, "code block")
    while not turn.full and (start := _CODE_START.search(text, turn.position)):
        if start[0] == "<code>":
            turn.say(start.start())
            turn.act(*_tagged_cell(text, start.end()))
        else:
            turn.skip_thought(start.start())
    return turn.build()


def _tagged_cell(text: str, start: int) -> tuple[CodeCell | ParseError, int]:
    fence = _INNER_FENCE.match(text, start)
    close = _FENCE_END.search(text, fence.end()) if fence else None
    if fence and close:
        after = len(text) - len(text[close.end() :].lstrip())
        if after == len(text) or text.startswith(_CODE_END, after):
            return _cell(text[fence.end() : close.start()]), min(after + len(_CODE_END), len(text))
    tag = text.find(_CODE_END, start)
    if tag < 0:
        return ParseError("unclosed", "<code> is not closed: end the code with </code>."), len(text)
    return _cell(text[start:tag].removeprefix("\n")), tag + len(_CODE_END)


def _cell(inside: str) -> CodeCell | ParseError:
    code = inside.removesuffix("\n").removesuffix("\r").replace("\r\n", "\n")
    if not code.strip():
        return ParseError("empty", "The code block is empty.")
    if len(code) > MAX_ACTION_CHARACTERS:
        text = f"The code has {len(code)} characters; at most {MAX_ACTION_CHARACTERS} are run. Make it shorter."
        return ParseError("too_long", text)
    return CodeCell(code)
