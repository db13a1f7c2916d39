"""Code with test cases: the styles of the public data sets, and solutions that try to pass without solving."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.agent.in_process_runner import InProcessRunner
from vrl.agent.rewards.code_runner import code_runner, grading_sandbox, provide_code_runner
from vrl.agent.rewards.code_tests import last_code, read_tests, run_tests, same_output
from vrl.agent.rewards.registry import find_rule
from vrl.agent.rewards.types import RewardSpec
from vrl.protocol.config.sandbox import SandboxConfig
from vrl.protocol.errors import ConfigError, SandboxError


@pytest.fixture(autouse=True)
def runner() -> Iterator[InProcessRunner]:
    made = InProcessRunner()
    provide_code_runner(lambda: made)
    yield made
    assert made.open_sessions == 0
    provide_code_runner(None)


def score(code: str, truth: Any, **kwargs: Any) -> dict[str, float]:
    return find_rule("code_tests")(
        data_source="code_tests", solution_str=f"So:\n```python\n{code}\n```", ground_truth=truth, **kwargs
    )


STDIN = {"inputs": ["1 2\n", "3 4\n", "10 -4\n"], "outputs": ["3\n", "7\n", "6\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4], [10, -4]], "outputs": [3, [7], 6]}
ASSERTS = {"test_list": ["assert add(1, 2) == 3", "assert add(3, 4) == 7", "assert add(10, -4) == 6"]}
PROGRAM = "a, b = map(int, input().split())\nprint(a + b)"
FUNCTION = "def add(a, b):\n    return a + b"
LIVE = [{"input": "[1, 2]", "output": "3", "testtype": "functional", "metadata": {"func_name": "floor"}}]
UNNAMED = [{"input": "[1, 2]", "output": "3", "testtype": "functional"}]
LIST = [{"input": "1 2", "output": "3"}]


@pytest.mark.parametrize(
    ("code", "truth"),
    [
        (PROGRAM, STDIN),
        (PROGRAM, json.dumps(STDIN)),
        (PROGRAM, LIST),
        (PROGRAM, {"inputs": [["1 2"]], "outputs": [["3"]]}),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(0)", STDIN),
        ("def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()", STDIN),
        (FUNCTION, CALLS),
        ("class Solution:\n    def add(self, a, b):\n        print('thinking')\n        return a + b", CALLS),
        (FUNCTION, {**CALLS, "inputs": ["1\n2", "3\n4", "10\n-4"]}),
        (FUNCTION, ASSERTS),
        (FUNCTION, {"functional": "def check(f):\n    assert f(1, 2) == 3\ncheck(add)"}),
        ("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))", STDIN),
        ("print(sum(map(int, open(0).read().split())))", STDIN),
        ("import os\nprint(sum(map(int, os.read(0, os.fstat(0).st_size).split())))", STDIN),
        ("import os\nprint(sum(map(int, input().split())))\nos._exit(0)", STDIN),
        (
            "class Solution:\n    def add(self, a: Optional[int], b: int) -> int:\n        return pow(a + b, 1, 99)",
            CALLS,
        ),
        ("class Solution:\n    def floor(self, x: List[int]) -> int:\n        return floor(sum(x))", LIVE),
        ("class Solution:\n    def floor(self, x):\n        return sum(x)", json.dumps(UNNAMED)),
        (
            "import sys\nprint(len(sys.stdin.read()))",
            {"inputs": ["\U0001f600\n" + "x" * 300_000], "outputs": ["300002"]},
        ),
    ],
)
def test_right_code_passes(code: str, truth: Any) -> None:
    assert score(code, truth) == {"score": 1.0, "acc": 1.0, "has_code": 1.0}


@pytest.mark.parametrize(
    ("code", "truth", "share"),
    [
        ("a, b = map(int, input().split())\nprint(a + abs(b))", STDIN, 2 / 3),
        ("print(3)", STDIN, 1 / 3),
        ("print('3 7 6')", STDIN, 0),
        ("1 / 0", STDIN, 0),
        ("def broken(:", STDIN, 0),
        ("import sys; sys.exit(0)", STDIN, 0),
        ("print(sum(map(int, input().split())))\nraise SystemExit(1)", STDIN, 0),
        ("class Solution:\n    pass", UNNAMED, 0),
        ("def add(a, b):\n    return a + abs(b)", CALLS, 2 / 3),
        ("def sub(a, b):\n    return a - b", CALLS, 0),
        ("def add(a, b):\n    return 10 ** 400 if a == 1 else a + b", CALLS, 2 / 3),
        ("def add(a, b):\n    print(a + b)", CALLS, 0),  # printed is not returned
        ("def add(a, b):\n    return a - b", ASSERTS, 0),
        ("import sys\ndef add(a, b):\n    sys.exit(0)", ASSERTS, 0),  # leaving is not passing
        ("raise SystemExit", ASSERTS, 0),
        ("while False: pass", {"functional": "assert False"}, 0),
    ],
)
def test_wrong_code_fails(code: str, truth: Any, share: float) -> None:
    assert score(code, truth)["score"] == 0.0
    result = score(code, truth, continuous=True)
    assert (result["score"], result["acc"]) == (pytest.approx(share), 0.0)


def test_which_code_counts() -> None:
    assert last_code("```python\na\n```\n```python\nb\n```\n```text\nc\n```") == "b"
    assert last_code("<code>\n```python\nb\n```\n</code>") == "b"
    assert last_code("print(1)") is None
    assert find_rule("apps")(data_source="apps", solution_str="print(3)", ground_truth=STDIN)["has_code"] == 0.0


def test_outputs_compare_by_words_and_by_value() -> None:
    assert same_output("1  2\n3 ", "1 2 3\n")
    assert same_output("0.33333334 x", "0.333333333 x")
    assert same_output("2", "2.0")
    assert not same_output("2.0", "2")  # a whole number is wanted
    assert not same_output("12", "1 2")
    assert not same_output("nan", "1.0")
    assert not same_output("", "1")


def test_code_that_takes_too_long_keeps_what_it_has_passed(runner: InProcessRunner) -> None:
    """Each cell counts 10 s here; after two of them no other test is begun."""
    runner.cell_seconds = 10.0
    assert run_tests(runner, PROGRAM, read_tests(STDIN), seconds=15.0) == 2
    assert run_tests(runner, FUNCTION, read_tests(CALLS), seconds=15.0) == 2
    provide_code_runner(lambda: runner, 5.0)
    assert score(PROGRAM, STDIN, continuous=True)["score"] == pytest.approx(1 / 3)
    assert score(PROGRAM, STDIN)["score"] == 0.0


def test_a_sandbox_that_takes_too_long_is_no_fault_of_the_code(runner: InProcessRunner) -> None:
    """By its own account each cell ran 0.01 s, of the 0.02 s that it may; the answer takes longer than twice that."""
    slow = f"import time\ntime.sleep(0.04)\n{PROGRAM}"
    with pytest.raises(
        SandboxError, match=r"took 0\..* s for 1 of 3 tests that ran 0.0 s; raise reward_model\.timeout"
    ):
        run_tests(runner, slow, read_tests(STDIN), seconds=0.02)
    assert run_tests(runner, slow, read_tests({"inputs": ["1 2"], "outputs": ["3"]}), seconds=0.02) == 1  # it is done


def test_a_share_looks_at_ten_tests_the_rest_at_all() -> None:
    many = {"inputs": [f"{n} 1" for n in range(12)], "outputs": [f"{n + 1}" for n in range(12)]}
    wrong = "a, b = map(int, input().split())\nprint(a + b if a < 11 else 0)"
    assert score(wrong, many)["score"] == 0.0
    assert score(wrong, many, continuous=True)["score"] == 1.0
    assert score(wrong, many, continuous=True, max_tests=12)["score"] == pytest.approx(11 / 12)
    assert score(wrong, many, max_tests=3)["score"] == 1.0


def test_the_sandbox_of_rules_fits_in_their_time_limit() -> None:
    spec = RewardSpec(sandbox=SandboxConfig(cell_seconds=10.0, output_chars=50), time_limit_seconds=6.0)
    made = grading_sandbox(spec)
    assert (made.cell_seconds, made.output_chars) == (2.0, 1 << 20)
    assert grading_sandbox(replace(spec, time_limit_seconds=90.0)).cell_seconds == 10.0


def test_tests_that_are_none() -> None:
    with pytest.raises(ValueError, match="all functional"):
        read_tests([*UNNAMED, *LIST])
    for truth in ({}, {"inputs": ["1"], "outputs": []}, [], {"inputs": []}):
        with pytest.raises(ValueError, match="as many inputs as outputs"):
            read_tests(truth)
    with pytest.raises(ValueError, match="not int"):
        read_tests(3)
    many = {"inputs": ["1"] * 99, "outputs": ["1"] * 99}
    assert (len(read_tests(many)), len(read_tests(many, 10))) == (99, 10)


def test_without_a_sandbox_it_says_so() -> None:
    provide_code_runner(None)
    with pytest.raises(ConfigError, match="no code sandbox"):
        code_runner()
