"""Tool calls as Hermes, Qwen and DeepEyes write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The JSON value ends a call, not the first closing tag, so tags inside strings do no harm. Calls inside closed
`<think>` tags are not made.
"""

import json
import math
import re
from typing import Any, Final, NoReturn

from vrl.agent.parsers.types import MAX_ACTION_CHARACTERS, ParsedTurn, ParseError, ToolCall, TurnBuilder

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
FORM: Final = f'{OPEN}\n{{"name": <tool name>, "arguments": <JSON object>}}\n{CLOSE}'

_MAX_DEPTH: Final = 64
_MAX_NAME_CHARACTERS: Final = 200
_TAG: Final = re.compile(r"<think>|<tool_call>")
_END: Final = re.compile(r"</?tool_call>")
_SPACE: Final = re.compile(r"\s*")


def parse_tool_calls(text: str) -> ParsedTurn:
    """Return the calls of a turn, each as it reads or as the error to tell the model.

    A complete call at the end of the text needs no closing tag: a stop string may have cut it off. Python's `NaN` and
    `Infinity`, numbers beyond float64 and values nested deeper than 64 are bad JSON. A lone surrogate becomes a
    question mark.
    """
    turn = TurnBuilder(text, "tool call")
    while not turn.full and (tag := _TAG.search(text, turn.position)):
        if tag[0] == OPEN:
            turn.say(tag.start())
            turn.act(*_read_call(text, tag.end()))
        else:
            turn.skip_thought(tag.start())
    if not turn.num_found and CLOSE in text[turn.position :]:
        error = ParseError("unopened", f"{CLOSE} without {OPEN} before it. A call has the form\n{FORM}")
        turn.act(error, turn.position)
    return turn.build()


def _read_call(text: str, start: int) -> tuple[ToolCall | ParseError, int]:
    """Return the call whose tag ends at `start`, and where the text goes on after it."""
    value_start = _after_space(text, start)
    try:
        value, value_end = _DECODER.raw_decode(text, value_start)
    except RecursionError:
        return _unreadable(text, start, "it is nested too deeply")
    except json.JSONDecodeError as error:
        around = text[max(error.pos - 10, start) : error.pos + 10]
        return _unreadable(text, start, f"{error.msg} near {around!r}")
    except ValueError as error:  # of our own, or an integer of thousands of digits
        return _unreadable(text, start, str(error)[:200])
    end = _after_space(text, value_end)
    if text.startswith(CLOSE, end):
        return _checked(value, value_end - value_start), end + len(CLOSE)
    if end == len(text) or text.startswith(OPEN, end):
        return _checked(value, value_end - value_start), end
    return _unreadable(text, end, f"there is text after the JSON value: {text[end : end + 20]!r}")


def _unreadable(text: str, start: int, reason: str) -> tuple[ParseError, int]:
    """Say what is wrong with a call, and skip to its closing tag or the next opening one, searched from `start`."""
    end = _END.search(text, start)
    if end is None or end[0] == OPEN:
        error = ParseError("unclosed", f"{OPEN} is not closed. A call has the form\n{FORM}")
        return error, end.start() if end else len(text)
    if not text[start : end.start()].strip():
        return ParseError("empty", f"The tool call is empty. A call has the form\n{FORM}"), end.end()
    return ParseError("bad_json", f"The tool call is not valid JSON: {reason}. A call has the form\n{FORM}"), end.end()


def _checked(value: Any, length: int) -> ToolCall | ParseError:
    if length > MAX_ACTION_CHARACTERS:
        text = f"The tool call has {length} characters; at most {MAX_ACTION_CHARACTERS} are read. Make it shorter."
        return ParseError("too_long", text)
    try:
        return _call_of(_tidy(value, 0))
    except ValueError as error:
        return ParseError("bad_json", f"The tool call cannot be read: {error}.")


def _call_of(value: Any) -> ToolCall | ParseError:
    if not isinstance(value, dict):
        return ParseError("not_object", f"The tool call must be one JSON object. A call has the form\n{FORM}")
    if "name" not in value:
        return ParseError("missing_name", 'The tool call has no "name".')
    name = value["name"]
    if not isinstance(name, str) or not name.strip() or len(name) > _MAX_NAME_CHARACTERS:
        return ParseError("bad_name", 'The "name" of a tool call must be the name of a tool, as a string.')
    if "arguments" not in value:
        return ParseError("missing_arguments", f'The call of {name!r} has no "arguments"; use {{}} for none.')
    arguments = value["arguments"]
    if isinstance(arguments, str):
        arguments = _decode_text(arguments)
    if not isinstance(arguments, dict):
        return ParseError("bad_arguments", f'The "arguments" of the call of {name!r} must be a JSON object.')
    return ToolCall(name.strip(), arguments)


def _decode_text(text: str) -> Any:
    """Return the object that a text holds: some models write their arguments as a JSON string."""
    try:
        return _tidy(_DECODER.decode(text), 0)
    except (ValueError, RecursionError):
        return None


def _tidy(value: Any, depth: int) -> Any:
    """Return a JSON value whose texts can be encoded. Raises ValueError when it is nested too deeply."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {_MAX_DEPTH}")
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode() if not value.isascii() else value
    if isinstance(value, list):
        return [_tidy(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {_tidy(key, depth): _tidy(item, depth + 1) for key, item in value.items()}
    return value


def _after_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match else start


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)
