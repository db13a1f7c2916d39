"""The calculator against Python's own arithmetic, and what must not be computed."""

import math
import time

import pytest

from tests.agent.episodes import prompt
from vrl.agent.tools.calculator import CalculationError, calculate, calculator_tool
from vrl.agent.tools.types import ToolResources


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3 + 4 * 2", 11),
        (" -(2 - 5) ** 2", -9),
        ("7 // 2 + 7 % 2 + 7 / 2", 7.5),
        ("2^10", 1024),
        ("3 \u00d7 4 \u00f7 2 \u2212 1", 5),
        ("2e3 + 1.5E-1", 2000.15),
        ("1_000 * 2", 2000),
        ("sqrt(16) + ABS(-2)", 6),
        ("round(2.5) + max(1, 2, 3)", 5),
        ("2 * pi + e", 2 * math.pi + math.e),
        ("log(8, 2)", 3),
        ("(1 +\n2)", 3),
        ("2 ** -2", 0.25),
        ("1 ** 10 ** 18", 1),
    ],
)
def test_values(expression: str, value: float) -> None:
    assert calculate(expression) == pytest.approx(value)


@pytest.mark.parametrize(
    "expression",
    [
        *("", " ", "1 +", "1 / 0", "5 % 0", "0 ** -1", "(-1) ** 0.5", "1e308 * 10", "10.0 ** 400"),
        *("9 ** 9 ** 9", "2 ** 5000", "1.5 ** 10 ** 300", "(" * 500 + "1" + ")" * 500, "1" * 2000, "-" * 900 + "1"),
        *("__import__('os')", "x", "a.b", "[1]", "'a' * 9", "lambda: 1", "True", "2pi", "1if 1else 2", "1 < 2"),
        *("abs", "abs()", "abs(1, 2)", "max()", "sqrt(-1)", "round(1, 2)", "f(1)", "gcd(1.5, 2)", "\x00", "1;2", "1=1"),
        *("exp(1000)", "1j", "0x10", "log(0)", "*".join(["999999999"] * 100) * 1 + "*" + "*".join(["99999999"] * 9)),
        *("(2 ** 4000) * (2 ** 4000)", "factorial(10)", "min(max)", "abs(x=1)", "1,2", "(1, 2)"),
    ],
)
def test_everything_else_is_an_error(expression: str) -> None:
    start = time.perf_counter()
    with pytest.raises(CalculationError):
        calculate(expression)
    assert time.perf_counter() - start < 0.5


def test_the_tool() -> None:
    session = calculator_tool({}, ToolResources()).start(prompt(), {})
    assert session.call({"expression": "1 + 1"}).text == "2"
    answer = session.call({"expression": "1 / 0"})
    assert answer.failed
    assert "division by zero" in answer.text
