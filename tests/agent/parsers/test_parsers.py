"""Parsers against the golden cases, and what models print beyond them."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from vrl.agent.parsers.answer import last_answer
from vrl.agent.parsers.code import parse_code_tags, parse_fenced_code
from vrl.agent.parsers.hermes import parse_tool_calls
from vrl.agent.parsers.types import MAX_ACTIONS, Action, CodeCell, ParseError, ToolCall

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "tool_calls.json").read_text())
PARSERS = {"hermes": parse_tool_calls, "python": parse_fenced_code}


def plain(action: Action) -> dict[str, Any]:
    match action:
        case ToolCall(name, arguments):
            return {"name": name, "arguments": arguments}
        case CodeCell(code):
            return {"code": code}
        case ParseError(kind, message):
            assert message
            return {"error": kind}


def calls(text: str) -> list[dict[str, Any]]:
    return [plain(action) for action in parse_tool_calls(text).actions]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["id"])
def test_golden_calls(case: dict[str, Any]) -> None:
    found = [plain(action) for action in PARSERS[case["style"]](case["text"]).actions]
    if case["alternatives"] != "any":
        assert found in [case["expect"], *case["alternatives"]]


CALL = '<tool_call>{"name": "f", "arguments": {"x": "<answer>1</answer>"}}</tool_call>'
F = {"name": "f", "arguments": {"x": "<answer>1</answer>"}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL.removesuffix("</tool_call>"), [F]),  # cut off by a stop string
        (CALL.removesuffix("</tool_call>") + CALL, [F, F]),
        (CALL.removesuffix("</tool_call>") + " and more", [{"error": "unclosed"}]),
        ("I use <tool_call> now: " + CALL, [{"error": "unclosed"}, F]),
        ("half a call</tool_call>", [{"error": "unopened"}]),
        ("thought of the prompt</think>" + CALL, [F]),
        ("a thought " + CALL + "</think>then", []),
        ("<think>never closed " + CALL, [F]),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', [{"error": "bad_json"}]),
        ('<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', [{"error": "bad_json"}]),
        (f'<tool_call>{{"name": "f", "arguments": {{"x": {"9" * 5000}}}}}</tool_call>', [{"error": "bad_json"}]),
        (f"<tool_call>{'[' * 100000}</tool_call>", [{"error": "bad_json"}]),
        (f'<tool_call>{{"name": "f", "arguments": {"[" * 70 + "]" * 70}}}</tool_call>', [{"error": "bad_json"}]),
        ('<tool_call>{"name": "f", "arguments": {"x": "%s"}}</tool_call>' % ("y" * 100_000), [{"error": "too_long"}]),
        (
            r'<tool_call>{"name": "f", "arguments": {"x": "\ud800"}}</tool_call>',
            [{"name": "f", "arguments": {"x": "?"}}],
        ),
        ('<tool_call>{"a": "</tool_call>"} x</tool_call>' + CALL, [{"error": "bad_json"}, F]),
    ],
)
def test_calls(text: str, expected: list[dict[str, Any]]) -> None:
    assert calls(text) == expected


def test_too_many_calls_are_one_error() -> None:
    found = parse_tool_calls(CALL * 1000).actions
    assert len(found) == MAX_ACTIONS + 1
    assert isinstance(found[-1], ParseError)
    assert found[-1].kind == "too_many"


def test_an_answer_inside_a_call_is_none() -> None:
    assert last_answer(parse_tool_calls(CALL).content) is None
    assert last_answer(parse_tool_calls(f"{CALL} <answer> 4 </answer>").content) == "4"
    assert last_answer("<answer>1</answer><answer>2</answer>") == "2"
    assert last_answer("<think><answer>1</answer></think>") is None
    assert last_answer("</answer><answer>") is None
    assert last_answer("") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<code>\n```python\nprint('</code>')\n```\n</code>", [{"code": "print('</code>')"}]),
        ("<code>\n```python\nprint(1)\n```", [{"code": "print(1)"}]),
        ("<code>print(1)</code> and <code>\nprint(2)\n</code>", [{"code": "print(1)"}, {"code": "print(2)"}]),
        ("<code>print(1)", [{"error": "unclosed"}]),
        ("<code> </code>", [{"error": "empty"}]),
        ("<think><code>1</code></think>", []),
        ("```python\nprint(1)\n```", []),
    ],
)
def test_code_tags(text: str, expected: list[dict[str, Any]]) -> None:
    assert [plain(action) for action in parse_code_tags(text).actions] == expected


@pytest.mark.parametrize(
    "text",
    [
        "```\nprint(1)\n```",
        "Sure: ```python\nprint(1)\n```",
        "````python\nprint(1)\n````",
        "```python title=a\nprint(1)\n```",
        "```{.python}\nprint(1)\n```",
        "``` Python \r\nprint(1)\r\n```\r\n",
        "~~~python\nprint(1)\n~~~",
        "1. First:\n\n      ```python\n      print(1)\n      ```\n2. Then",
        "- ```py\n  print(1)\n  ```",
        "\t```python\n\tprint(1)\n\t```",
        "```text\nprint(2)\n```\n```python\nprint(1)\n```\n```\nx = 1\n```",  # what it expects to be printed
        "```json\n{}\n```\n```\nprint(1)\n```",
    ],
)
def test_fences_of_many_kinds(text: str) -> None:
    assert [plain(action) for action in parse_fenced_code(text).actions] == [{"code": "print(1)"}]


@pytest.mark.parametrize(
    "text",
    [
        "```json\n[1]\n```",
        "```output\nx = 1\n```",
        "```text\nprint(1)\n```",
        "~~~text\n```python\nprint(1)\n```\n~~~",
        "```\n42\n```",
        "```\nThe answer is 4\n```",
        "```\nOutput: 5\n```",
        '```\n{"a": [1, 2]}\n```',
        "I would write it in ```python",
        "```\n" + "(" * 10_000 + "\n```",
        "```\n" + "-" * 10_000 + "f()\n```",
    ],
)
def test_what_is_no_code(text: str) -> None:
    parsed = parse_fenced_code(text)
    assert (parsed.actions, parsed.content) == ((), text)


def test_a_fence_closes_where_it_was_opened() -> None:
    code = 'text = """\n    ```\n"""\nprint(text)'
    assert [plain(action) for action in parse_fenced_code(f"```python\n{code}\n```").actions] == [{"code": code}]
    code = 'text = """\n```\n"""'
    for fence in ("````", "~~~"):
        found = parse_fenced_code(f"{fence}python\n{code}\n{fence}").actions
        assert [plain(action) for action in found] == [{"code": code}]


def test_fences_of_other_languages_hide_what_they_hold() -> None:
    text = "````\n```text\n```python\nnot this\n```\n```py\nthis\n```"
    parsed = parse_fenced_code("```text\n```python\nnot this\n```\n```py\nthis\n```")
    assert [plain(action) for action in parsed.actions] == [{"code": "this"}]
    assert "not this" in parsed.content
    assert parse_fenced_code(text).actions is not None


SLOW = [
    "<think>",
    "</think>",
    "<tool_call>",
    "<tool_call>[",
    '<tool_call>{"a":"</tool_call>',
    '<tool_call>["</tool_call>",',
    "<tool_call> \n",
    "<answer>",
    "```python\n",
    "```x\n",
    "```\n",
    "`",
    "~~~ ",
    "~~~`",
    "a ```python\n",
    "````python\n```\n",
    "- - 1. ",
    "```\nf()\n```\n",
    "```\n(",
    "   ```",
    "<code>```p\n</code>",
    "<code>```p\n```\n x",
    "<code>",
    " ",
    "\n",
    '"\\',
]


@pytest.mark.parametrize("unit", SLOW)
def test_time_is_linear(unit: str) -> None:
    """A megabyte of the worst that a parser could meet; quadratic time would take minutes."""
    for text in (unit * (1_000_000 // len(unit)), unit * (500_000 // len(unit)) + "\n```\n</tool_call></code> x"):
        for parse in (parse_tool_calls, parse_fenced_code, parse_code_tags, last_answer):
            start = time.process_time()
            parse(text)
            assert time.process_time() - start < 2.0, parse.__name__


def test_long_scans_do_not_add_up() -> None:
    """Two of these calls may read far before they fail, never all of them."""
    random_source = random.Random(0)
    pieces = ["<tool_call>[", '"', ",", "\\", "</tool_call>", "1", " ", "{", ":"]
    for _ in range(20):
        text = "".join(random_source.choices(pieces, k=100_000))
        start = time.process_time()
        parse_tool_calls(text)
        assert time.process_time() - start < 1.0
