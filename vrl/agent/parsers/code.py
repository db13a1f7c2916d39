"""Code that a turn wants to run: fenced blocks of Python, and `<code>` tags (DeepEyes v2)."""

import ast
import re
import textwrap
from typing import Final

from vrl.agent.parsers.types import MAX_ACTION_CHARACTERS, CodeCell, ParsedTurn, ParseError, TurnBuilder

_PYTHON: Final = frozenset({"python", "py", "python3"})
_START: Final = re.compile(r"<think>|(?<![`~])(`{3,}+|~{3,}+)([^\n`~]*)$", re.MULTILINE)
_LANGUAGE: Final = re.compile(r"\s*\{?\.?([\w+#-]*)")  # "python title=a" and "{.python}" too
_BEFORE_FENCE: Final = re.compile(r"[ \t]*(?:(?:[-*+]|[0-9]{1,3}[.)])[ \t]+)*")  # the marks of a list
_FENCE_END: Final = re.compile(r"^([ \t]*)(`{3,}+|~{3,}+)[ \t]*\r?$", re.MULTILINE)
_DOES_SOMETHING: Final = (
    ast.Call,
    ast.Assign,
    ast.AugAssign,
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.ClassDef,
    ast.For,
    ast.While,
)
_MAX_PLAIN_BLOCKS, _MAX_PLAIN_CHARACTERS = 50, 20_000  # of a turn, of a block; ast reads them
_TAG_FENCE_END: Final = re.compile(r"^ {0,3}```[ \t]*\r?$", re.MULTILINE)
_CODE_START: Final = re.compile(r"<think>|<code>")
_CODE_END: Final = "</code>"
_INNER_FENCE: Final = re.compile(r"\s*```([^\n`]*)\n")


def parse_fenced_code(text: str) -> ParsedTurn:
    """Return the Python cells of a turn in order.

    A fence is three or more backticks or tildes and a language; it stands on a line of its own, in a list or behind a
    few words. It closes with as many on a line of their own, not much further in than it was opened; backticks inside a
    line belong to the code. Blocks of other languages are text. One without a language is a cell if no block of the
    turn is marked as Python, and it reads as Python that does something.
    """
    turn = _fenced(text, unmarked=False)
    return turn if turn.actions else _fenced(text, unmarked=True)


def _fenced(text: str, *, unmarked: bool) -> ParsedTurn:
    turn = TurnBuilder(text, "code block")
    never_closed: set[str] = set()  # fences behind words that nothing closes; each would be searched to the end again
    looked_at = 0
    while not turn.full and (start := _START.search(text, turn.position)):
        if start[1] is None:
            turn.skip_thought(start.start())
            continue
        language = _language(start[2])
        before = text[text.rfind("\n", 0, start.start()) + 1 : start.start()]
        alone = _BEFORE_FENCE.fullmatch(before) is not None
        if not alone and (language not in _PYTHON or start[1] in never_closed):
            turn.say(start.end())
            continue
        close = _close(text, start, len(before) if alone else 0)
        inside = text[start.end() + 1 : close.start()] if close else ""
        turn.say(start.start())
        look = unmarked and not language and close is not None and looked_at < _MAX_PLAIN_BLOCKS
        looked_at += look
        if close and (language in _PYTHON or (look and _does_something(inside))):
            turn.act(_cell(inside), close.end())
        elif language in _PYTHON and alone:
            message = f"The code block is not closed: end it with {start[1]} on a line of its own."
            turn.act(ParseError("unclosed", message), len(text))
        elif alone:
            turn.say(close.end() if close else len(text))
        else:
            never_closed.add(start[1])
            turn.say(start.end())
    return turn.build()


def _language(info: str) -> str:
    match = _LANGUAGE.match(info)
    return match[1].lower() if match else ""


def _close(text: str, start: re.Match[str], indent: int) -> re.Match[str] | None:
    """Return the line that closes the fence; None when there is none."""
    for close in _FENCE_END.finditer(text, start.end() + 1):
        if close[2].startswith(start[1]) and len(close[1]) <= indent + 3:
            return close
    return None


def _does_something(code: str) -> bool:
    """Tell code from a list, a number or a sentence in a block without a language."""
    if len(code) > _MAX_PLAIN_CHARACTERS:
        return False
    try:
        tree = ast.parse(_dedented(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, _DOES_SOMETHING) for node in ast.walk(tree))


def _dedented(code: str) -> str:
    """Return code that begins further in, as in a list, moved to the left."""
    return textwrap.dedent(code) if code[:1] in {" ", "\t"} else code


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
    close = _TAG_FENCE_END.search(text, fence.end()) if fence else None
    if fence and close:
        after = len(text) - len(text[close.end() :].lstrip())
        if after == len(text) or text.startswith(_CODE_END, after):
            return _cell(text[fence.end() : close.start()]), min(after + len(_CODE_END), len(text))
    tag = text.find(_CODE_END, start)
    if tag < 0:
        return ParseError("unclosed", "<code> is not closed: end the code with </code>."), len(text)
    return _cell(text[start:tag].removeprefix("\n")), tag + len(_CODE_END)


def _cell(inside: str) -> CodeCell | ParseError:
    code = _dedented(inside.removesuffix("\n").removesuffix("\r").replace("\r\n", "\n"))
    if not code.strip():
        return ParseError("empty", "The code block is empty.")
    if len(code) > MAX_ACTION_CHARACTERS:
        text = f"The code has {len(code)} characters; at most {MAX_ACTION_CHARACTERS} are run. Make it shorter."
        return ParseError("too_long", text)
    return CodeCell(code)
