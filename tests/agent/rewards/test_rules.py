"""Rules against the golden scores of public implementations, and what users met with such rules."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from vrl.agent.rewards.number_text import first_number, last_number, read_number
from vrl.agent.rewards.registry import BUILT_IN_MODULES, find_rule, known_data_sources, register_reward
from vrl.protocol.errors import ConfigError

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "rewards.json").read_text())


def score(data_source: str, solution_str: str, ground_truth: Any, **kwargs: Any) -> float:
    returned = find_rule(data_source)(
        data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=None, **kwargs
    )
    return returned["score"] if isinstance(returned, dict) else returned


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["id"])
def test_golden_scores(case: dict[str, Any]) -> None:
    kwargs = {} if case.get("method") is None else {"method": case["method"]}
    actual = score(case["data_source"], case["solution_str"], case["ground_truth"], **kwargs)
    accepted = [case[name] for name in case["accept"]]
    assert any(actual == pytest.approx(value, abs=GOLDEN["tolerance"]) for value in accepted), (actual, accepted)


@pytest.mark.parametrize("module", BUILT_IN_MODULES)
def test_the_table_of_modules_says_what_they_register(module: str) -> None:
    for name in BUILT_IN_MODULES[module]:
        assert find_rule(name.replace("*", "anything")).__module__ == module
        assert name in known_data_sources()


def test_unknown_data_source_lists_the_known_and_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"'my/task'.*openai/gsm8k.*reasoning_gym/\*.*custom_reward_function\.path"):
        find_rule("my/task")


def test_a_taken_name_is_refused() -> None:
    find_rule("openai/gsm8k")
    with pytest.raises(ValueError, match="openai/gsm8k"):
        register_reward("openai/gsm8k")(score)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 1,234", 1),
        ("#### $1234", 1),
        ("#### 1234.", 1),
        ("#### 1234 dollars", 1),
        ("#### 1234 " + "and so on " * 50, 1),
        ("#### 123", 0),
        ("#### 12345", 0),
        ("the answer is 1234", 0),
        ("", 0),
    ],
)
def test_gsm8k_strict(text: str, expected: float) -> None:
    assert score("openai/gsm8k", text, "1234") == expected


def test_gsm8k_settings() -> None:
    assert score("openai/gsm8k", "#### 5", "4", format_score=0.25) == 0.25
    assert score("openai/gsm8k", "#### 4", "4", score=2.0) == 2.0
    assert score("openai/gsm8k", "none", "4", format_score=0.25) == 0
    with pytest.raises(ValueError, match=r"'strict' or 'flexible', got 'loose'"):
        score("openai/gsm8k", "#### 4", "4", method="loose")


@pytest.mark.parametrize("data_source", ["openai/gsm8k", "reasoning_gym/basic_arithmetic"])
def test_a_ground_truth_that_is_no_number_is_the_rows_fault(data_source: str) -> None:
    with pytest.raises(ValueError, match="ground truth 'a cat' is not a number"):
        score(data_source, "#### 4", "a cat")


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("cyan", "cyan", 1),
        (" cyan\n", "cyan", 1),
        ("cyan cyan", "cyan", 0),
        ("the answer is cyan", "cyan", 0),
        ("17", "17", 1),
        ("17", 17, 1),
        ("170", "17", 0),
        ("", "17", 0),
        ("I see it. <answer> cyan </answer>", "cyan", 1),
        ("<answer>red</answer> no, <answer>cyan</answer>", "cyan", 1),
        ("<answer>red</answer> cyan", "cyan", 0),
        ("<answer>cyan", "cyan", 0),
    ],
)
def test_tiny(text: str, truth: Any, expected: float) -> None:
    assert score("tiny/visual", text, truth) == expected
    assert score("tiny/arithmetic", text, truth) == expected


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("7", "7", 1),
        ("The answer is 7.", "7", 1),
        ("3 + 4 = 7", "7", 1),
        ("10-7", "7", 1),  # the minus is an operator
        ("It is -7", "-7", 1),
        ("It is -7", "7", 0),
        ("7 or 8", "7", 0),
        ("17", "7", 0),
        ("seven", "7", 0),
        ("7.0", 7, 1),
    ],
)
def test_reasoning_gym(text: str, truth: Any, expected: float) -> None:
    assert score("reasoning_gym/chain_sum", text, truth) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10),
        ("1e-1", Fraction(1, 10)),
        ("-0.5", Fraction(-1, 2)),
        ("-$1,200.50", Fraction(-2401, 2)),
        ("3/4", Fraction(3, 4)),
        ("1/0", None),
        ("10 points", None),
        ("ten", None),
        ("", None),
        ("1" * 5000, None),
        ("1e999999999", None),
    ],
)
def test_a_number_is_read_whole_or_not_at_all(text: str, value: Fraction | None) -> None:
    assert read_number(text) == value


def test_numbers_in_a_text() -> None:
    assert first_number("of 3 pears and 1,004 apples") == 3
    assert last_number("of 3 pears and 1,004 apples") == 1004
    assert last_number("none") is None


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("1,2", "12", 0),
        ("3, 2", "2, 3", 1),
        ("3\\frac{1}{2}", "3.5", 1),
        ("18 or 19", "18", 0),
        ("[2,3]", "[2,3)", 0),
        ("e^{-x^2}", "e^{-x^{2}}", 1),
        ("9^{9^{9^{9}}}", "1", 0),  # nobody computes it
        ("(x+y+z)^{9}^{9}", "x", 0),
        ("(a+b+c+d+e+f)^{99}", "x", 0),
        ("\\frac{1}{0}", "0", 0),
        ("\\frac{", "1", 0),
    ],
)
def test_boxed_answers(answer: str, truth: str, expected: float) -> None:
    assert score("lighteval/MATH", f"so \\boxed{{{answer}}}", truth) == expected


def test_the_same_score_in_a_thread_and_in_a_task() -> None:
    def call() -> float:
        return score("lighteval/MATH", "\\boxed{\\frac{1}{2}x}", "0.5x") + score(
            "lighteval/MATH", "\\boxed{1/2}", "0.5"
        )

    async def in_a_task() -> float:
        return call()

    with ThreadPoolExecutor(1) as threads:
        assert call() == threads.submit(call).result() == asyncio.run(in_a_task()) == 2


def test_an_answer_that_keeps_sympy_busy_is_wrong_in_a_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = find_rule("lighteval/MATH")
    monkeypatch.setattr("vrl.agent.rewards.boxed._MAX_SYMBOLIC_SECONDS", 0.3)
    endless = r"\boxed{(a+b+c+d+e+f+g+h)^9}"  # has minutes of terms

    def call() -> float:
        return rule(data_source="", solution_str=endless, ground_truth="(a+b)^2")

    begin = time.monotonic()
    with ThreadPoolExecutor(1) as threads:
        assert call() == threads.submit(call).result() == 0.0
    assert time.monotonic() - begin < 10
    assert rule(data_source="", solution_str=r"\boxed{b^2+2ab+a^2}", ground_truth="(a+b)^2") == 1.0
