"""Random and mutated model outputs through all parsers and tools: no exception, bounded time, sound observations."""

import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import pytest

from tests.agent.episodes import png, prompt
from vrl.agent.environments.deepeyes import read_observation
from vrl.agent.environments.observations import CUT_MARK, TextLimit
from vrl.agent.environments.registry import Environments, EnvironmentSettings
from vrl.agent.environments.types import StepResult
from vrl.agent.parsers.answer import last_answer
from vrl.agent.parsers.code import parse_code_tags, parse_fenced_code
from vrl.agent.parsers.hermes import parse_tool_calls
from vrl.agent.parsers.types import ParsedTurn
from vrl.agent.sandbox.types import CellResult

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tool_calls.json").read_text())
LIMIT = 500  # characters of an answer
TURN_SECONDS = 1.0  # of processor time, for one turn through everything

CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("calculator", {"expression": "sqrt(2 ** 10) * (3 - 1.5e2) // 7"}),
    ("image_zoom_in_tool", {"bbox_2d": [3, 4, 50, 40], "label": "a cat", "image_index": 1}),
    ("image_rotate_tool", {"angle": 33}),
    ("python", {"code": "import math\nfor i in range(3):\n    print('```', {'a': i})"}),
    ("search", {"query": "capital of France"}),
    ("upper", {"text": "hey", "times": 2, "nested": {"deep": [1, {"x": None}]}}),
)
FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<answer>", "</answer>", "<code>", "</code>"),
    *("```python\n", "```\n", "\n```", "<image>", "<|im_end|>", "<|im_start|>user\n", '{"name": ', '"arguments": '),
    *("{", "}", "[", "]", '"', "\\", "\\u0000", "\\ud800", ",", ":", "null", "true", "NaN", "Infinity", "-", "1e999"),
    *("9" * 400, "\x00", "\n", "\r\n", "\u2028", "\U0001f408", "\ufeff", "\u202e", " " * 50, "x" * 200, "(" * 60),
    *("**", "9**9**9", "1/0", "__import__", "[[" * 40, '{"a":' * 40, "sqrt", "0", "-1", "1e308"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 1e308, 10**30, "", "x", "\x00", "9" * 300, [], {}, [[1]], {"a": {"b": []}}),
    *([0, 0, 0, 0], [5, 5, 1, 1], [-1e9, -1e9, 1e9, 1e9], ["1", 2, 3, 4], [1, 2, 3], [1.2, 3.4, 5.6, 7.8], [None] * 4),
)


@final
class CompilingSession:
    """Reads code without running it: what it does is the sandbox's matter."""

    def run(self, code: str) -> CellResult:
        try:
            compile(code, "<cell>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError) as error:
            return CellResult(error=f"{type(error).__name__}: {error}")
        return CellResult(output=code * 3, images=(png(9, 9),) if "print" in code else ())

    def close(self) -> None:
        pass


@final
class CompilingRunner:
    def session(self, images: Sequence[bytes] = ()) -> CompilingSession:
        return CompilingSession()

    def close(self) -> None:
        pass


USER_TOOL = """
class Upper:
    def __init__(self, config, tool_schema):
        pass

    def execute(self, instance_id, parameters):
        return parameters["text"].upper() * int(parameters["times"]) + str(parameters["nested"]["deep"][1])
"""


def valid(source: random.Random) -> str:
    """A text that a well-behaved model could have written."""
    name, arguments = source.choice(CALLS)
    kind = source.randrange(7)
    if kind == 0:
        return f"I see.\n```python\n{source.choice(CALLS)[1].get('code', 'print(1)')}\n```"
    if kind == 1:
        return "<code>\n```python\nprint('</code>')\n```\n</code>"
    if kind == 2:
        return str(source.choice(GOLDEN["cases"])["text"])
    if kind == 3:
        return f"It is <answer>{source.choice(VALUES)}</answer>"
    if kind == 4:
        arguments = {key: source.choice((value, source.choice(VALUES))) for key, value in arguments.items()}
    call = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    return source.choice(("", "<think>Let me see.</think>\n")) + call * source.choice((1, 1, 1, 2, 40))


def mutated(source: random.Random, text: str) -> str:
    """The text with one to eight pieces taken out, put in, doubled, moved or replaced."""
    for _ in range(source.randrange(9)):
        start = source.randrange(len(text) + 1)
        end = min(len(text), start + source.choice((0, 1, 3, 20)))
        piece = source.choice(
            ("", source.choice(FRAGMENTS), chr(source.randrange(0xD800)), text[start:end] * 2, text[end:start:-1])
        )
        text = text[:start] + piece + text[end:]
    return text[: source.randrange(len(text) + 1)] if source.random() < 0.1 else text


def outputs(count: int, seed: int) -> Iterator[str]:
    source = random.Random(seed)
    for _ in range(count):
        if source.random() < 0.2:
            yield "".join(source.choices(FRAGMENTS, k=source.randrange(30)))
        else:
            yield mutated(source, valid(source))


def check(result: StepResult) -> None:
    if result.observation is None:
        return
    contents = [message["content"] for message in result.observation.messages]
    assert contents
    assert sum(content.count("<image>") for content in contents) == len(result.observation.images)
    assert all(len(content) <= LIMIT + len(CUT_MARK) + 20 * (1 + content.count("<image>")) for content in contents)
    info = dict(result.info)
    assert all(isinstance(text, str) for text in info.pop("tool_tracebacks", []))
    assert all(isinstance(value, int | float) for value in info.values())
    json.dumps(contents).encode()
    "".join(contents).encode()


def fuzz(count: int, seed: int, folder: Path) -> Counter[str]:
    """Run the outputs; return how often each outcome was met."""
    (folder / "upper.py").write_text(USER_TOOL)
    (folder / "corpus.jsonl").write_text('{"contents": "France\\nParis is the capital of France."}\n')
    parameters = {"type": "object", "properties": {"text": {}, "times": {}, "nested": {}}}
    user = {"class_name": f"{folder}/upper.py:Upper", "tool_schema": {"name": "upper", "parameters": parameters}}
    corpus = {"class_name": "search", "config": {"corpus_path": f"{folder}/corpus.jsonl"}}
    turn = {"max_tool_response_length": LIMIT, "max_parallel_calls": 3}
    tools = ["calculator", "image_zoom_in_tool", "image_rotate_tool", "python", corpus, user]
    environments = Environments(
        EnvironmentSettings(
            environments={
                "tools": {"class": "tools", "config": {"tools": tools, **turn}},
                "fences": {"class": "code_interpreter", "config": turn},
                "tags": {"class": "code_interpreter", "config": {"format": "code_tag", **turn}},
            }
        ),
        CompilingRunner(),
    )
    episodes = [environments.start(prompt(png(64, 48), env_name=name)) for name in ("tools", "fences", "tags")]
    seen: Counter[str] = Counter()
    for text in outputs(count, seed):
        start = time.process_time()
        turns = [parse(text) for parse in (parse_tool_calls, parse_fenced_code, parse_code_tags)]
        answer = last_answer(text)
        results = [episode.step(text) for episode in episodes]
        read_observation(text, TextLimit())
        seconds = time.process_time() - start
        assert seconds < TURN_SECONDS, (seconds, text[:2000])
        assert all(isinstance(turn, ParsedTurn) for turn in turns)
        for result in results:
            check(result)
            seen.update({key: int(bool(value)) for key, value in result.info.items()})
        seen.update(
            {
                "answers": int(answer is not None),
                "images": sum(bool(r.observation and r.observation.images) for r in results),
            }
        )
    for episode in episodes:
        episode.close()
    environments.close()
    return seen


def test_two_thousand_outputs(tmp_path: Path) -> None:
    seen = fuzz(2000, 0, tmp_path)
    # The fuzz says something only when much of it gets through to the tools.
    assert all(seen[name] > 50 for name in ("tool_calls", "tool_errors", "malformed_calls", "images", "answers")), seen


@pytest.mark.long
def test_a_hundred_thousand_outputs(tmp_path: Path) -> None:
    seen = fuzz(100_000, 1, tmp_path)
    assert seen["tool_calls"] > 10_000
