"""Code with test cases, run in the sandbox: programs that read and print, functions, and assert statements.

The expected outputs never enter the sandbox where that can be avoided (programs, functions): what the code prints is
compared here, so that it cannot claim to have passed.
"""

import json
import math
import secrets
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, final

from vrl.agent.parsers.code import parse_code_tags, parse_fenced_code
from vrl.agent.parsers.types import CodeCell
from vrl.agent.rewards.code_runner import code_runner, code_seconds
from vrl.agent.rewards.registry import register_reward
from vrl.agent.sandbox.types import ProgramRunner
from vrl.protocol.errors import SandboxError

_MAX_TESTS_FOR_A_SHARE = 10
_WAIT = 1.8  # times the seconds that code may run: what its tests may take with all waiting for the sandbox
# Cells that run in the sandbox. Each gives back the streams it changes: the next cell may have others.
_QUIET = """\
import io as _io, json as _json, sys as _sys
_streams = _sys.stdin, _sys.stdout, _sys.stderr
_out = _sys.stdout
_sys.stdin, _sys.stdout, _sys.stderr = _io.StringIO(), _io.StringIO(), _io.StringIO()
try:
    {body}
finally:
    _sys.stdin, _sys.stdout, _sys.stderr = _streams
_done = True
"""
# What LeetCode imports, below the built-in functions: a name is the solution's own only if it defines it.
_LOAD = """\
_names = {{}}
    exec(
        "import bisect, collections, functools, heapq, itertools, math, random, re, string, typing\\n"
        "from bisect import *; from collections import *; from functools import *; from heapq import *\\n"
        "from itertools import *; from math import *; from typing import *",
        _names,
    )
    import builtins as _builtins
    _scope = {{"__name__": "solution", "__builtins__": {{**_names, **vars(_builtins)}}}}
    exec(compile({code!r}, "solution.py", "exec"), _scope)"""
_CALL = """\
_name, _arguments = {name!r}, _json.loads({arguments!r})
    _name = _name or next(_key for _key in vars(_scope["Solution"]) if not _key.startswith("_"))
    _function = getattr(_scope["Solution"](), _name) if _name not in _scope else _scope[_name]
    _text = _json.dumps(_function(*_arguments), default=list)
    _out.write({mark!r} + _text + "\\n")"""
_ASSERT = """\
exec(compile({code!r}, "test.py", "exec"), _scope)
    _out.write({mark!r} + "\\n")"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TestCases:
    """The tests of one row, in one of three styles."""

    stdin: tuple[tuple[str, str], ...] = ()  # what a program reads, what it must print
    calls: tuple[tuple[str, Any], ...] = ()  # arguments of `function` as a JSON list, the value it must return
    asserts: tuple[str, ...] = ()  # Python code that raises when a test fails
    function: str = ""  # empty: the first public method of the class Solution

    def __len__(self) -> int:
        return len(self.stdin) + len(self.calls) + len(self.asserts)


def read_tests(ground_truth: Any, most: int | None = None) -> TestCases:
    """Return the tests of a ground truth, at most so many of them; None is all.

    Known forms, as mappings or JSON: `{"inputs", "outputs"}` with or without `"fn_name"` (APPS, TACO, codecontests), a
    list of `{"input", "output"}`, with `"testtype": "functional"` for calls (LiveCodeBench), and asserts as
    `{"test_list": [...]}` (MBPP) or `{"functional": code}`. Raises ValueError for everything else.
    """
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if isinstance(tests, Sequence):
        if any(test.get("testtype") == "functional" for test in tests):
            return _live_code_bench(tests[:most])
        tests = {"inputs": [test["input"] for test in tests], "outputs": [test["output"] for test in tests]}
    if not isinstance(tests, Mapping):
        raise ValueError(f"code tests are a mapping or a list, not {type(tests).__name__}")
    if tests.get("test_list") or tests.get("functional"):
        asserts = [*(tests.get("test_list") or ()), *([tests["functional"]] if tests.get("functional") else [])]
        return TestCases(asserts=tuple(str(code) for code in asserts[:most]))
    inputs, outputs = list(tests.get("inputs") or ())[:most], list(tests.get("outputs") or ())[:most]
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"code tests need as many inputs as outputs, at least one; got {len(inputs)}, {len(outputs)}")
    name = tests.get("fn_name")
    if not name:
        return TestCases(stdin=tuple((_lines(i), _lines(o)) for i, o in zip(inputs, outputs, strict=True)))
    calls = tuple((_arguments(i), o) for i, o in zip(inputs, outputs, strict=True))
    return TestCases(calls=calls, function=str(name))


def _live_code_bench(tests: Sequence[Mapping[str, Any]]) -> TestCases:
    """Return calls: an input is one JSON value a line, an output one; the name stands in `metadata`, if anywhere."""
    if not all(test.get("testtype") == "functional" for test in tests):
        raise ValueError("code tests of one row are all functional, or none is")
    name = (tests[0].get("metadata") or {}).get("func_name") or tests[0].get("fn_name") or ""
    calls = tuple((_arguments(test["input"]), json.loads(test["output"])) for test in tests)
    return TestCases(calls=calls, function=str(name))


def last_code(text: str) -> str | None:
    """Return the last Python cell of a response, from a fence or a `<code>` tag; None when it has none."""
    cells = [
        action.code
        for parse in (parse_code_tags, parse_fenced_code)
        for action in parse(text).actions
        if isinstance(action, CodeCell)
    ]
    return cells[-1] if cells else None


def run_tests(
    runner: ProgramRunner, code: str, tests: TestCases, *, stop_at_failure: bool = False, seconds: float = math.inf
) -> int:
    """Return how many tests the code passes. Each program has an interpreter of its own; the rest share one.

    Once the code has run for so many `seconds` it passes no more: a slow program is the model's fault, and must not
    take the time limit of the whole reward. Raises SandboxError when it is the sandbox that takes so long.
    """
    outcomes = _programs(runner, code, tests) if tests.stdin else _functions(runner, code, tests)
    passed, ran, began = 0, 0.0, time.monotonic()
    with closing(outcomes):  # it closes its interpreter
        for number, (outcome, took) in enumerate(outcomes, 1):
            passed += outcome
            ran += took
            if ran >= seconds or number == len(tests) or (stop_at_failure and not outcome):
                break
            waited = time.monotonic() - began
            if waited > _WAIT * seconds:
                raise SandboxError(
                    f"the code sandbox took {waited:.1f} s for {number} of {len(tests)} tests that ran {ran:.1f} s; "
                    "raise reward_model.timeout, or set max_tests in reward_kwargs"
                )
    return passed


@register_reward("code_tests", "codecontests", "apps", "codeforces", "taco")
def compute_score(
    *, solution_str: str, ground_truth: Any, continuous: bool = False, max_tests: int | None = None, **_: Any
) -> dict[str, float]:
    """Return 1 when the last code of the response passes all tests, else 0; with `continuous` the share it passes.

    Only the first `max_tests` are looked at: by default all, with `continuous`, where one that fails does not end it,
    the first ten. Beside the score stand `acc` (all passed) and `has_code`. Tests that are not reached while the code
    runs for half of `reward_model.timeout` are not passed. Raises ValueError for a ground truth that holds no tests,
    SandboxError when the sandbox does not answer in time.
    """
    if max_tests is None and continuous:
        max_tests = _MAX_TESTS_FOR_A_SHARE
    tests = read_tests(ground_truth, max_tests)
    code = last_code(solution_str)
    if code is None:
        return {"score": 0.0, "acc": 0.0, "has_code": 0.0}
    passed = run_tests(code_runner(), code, tests, stop_at_failure=not continuous, seconds=code_seconds())
    share = passed / len(tests)
    acc = float(share == 1.0)
    return {"score": share if continuous else acc, "acc": acc, "has_code": 1.0}


def _programs(runner: ProgramRunner, code: str, tests: TestCases) -> Generator[tuple[bool, float], None, None]:
    for stdin, expected in tests.stdin:
        result = runner.run_program(code, stdin)
        yield result.error is None and same_output(result.output, expected), result.seconds


def _functions(runner: ProgramRunner, code: str, tests: TestCases) -> Generator[tuple[bool, float], None, None]:
    """Yield whether each test is passed, and how many seconds it took."""
    session = runner.session()
    try:
        if session.run(_quiet(_LOAD, code=code)).error is not None:
            return
        for arguments, expected in tests.calls:
            mark = secrets.token_hex(16)  # so that what the code prints by itself is no result
            result = session.run(_quiet(_CALL, name=tests.function, arguments=arguments, mark=mark))
            right = result.error is None and _same_value(result.output.rpartition(mark)[2], expected)
            yield right, result.seconds
        for test in tests.asserts:
            mark = secrets.token_hex(16)  # a solution that leaves early has not passed
            result = session.run(_quiet(_ASSERT, code=test, mark=mark))
            yield result.output.strip().endswith(mark), result.seconds
    finally:
        session.close()


def _quiet(body: str, **values: str) -> str:
    """Return a cell that runs `body` while what it prints by itself goes nowhere."""
    return _QUIET.format(body=body.format(**values))


def same_output(output: str, expected: str) -> bool:
    """Tell whether two outputs are the same word by word; numbers may differ by one part in a million."""
    said, wanted = output.split(), expected.split()
    return len(said) == len(wanted) and all(map(_same_word, said, wanted))


def _same_word(said: str, wanted: str) -> bool:
    if said == wanted:
        return True
    try:
        mine, right = float(said), float(wanted)
    except ValueError:
        return False
    return "." in wanted and abs(mine - right) <= 1e-6 * max(1.0, abs(right))


def _same_value(text: str, expected: Any) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return value == expected or [value] == expected


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _arguments(value: Any) -> str:
    """Return arguments as a JSON list: given so, or as text with one JSON value a line (LiveCodeBench)."""
    if isinstance(value, str):
        value = [json.loads(line) for line in value.splitlines() if line.strip()]
    return json.dumps(list(value))
