"""Arithmetic that cannot harm: a syntax tree of numbers, operators and a few functions, all bounded."""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from vrl.agent.tools.types import StatelessTool, ToolAnswer, ToolResources, check_settings, failed, function_schema
from vrl.protocol.trajectory import Prompt

_MAX_CHARACTERS: Final = 1000
_MAX_BITS: Final = 4096  # of a whole number: 1,233 digits
_MAX_DEPTH: Final = 100
_ALLOWED: Final = re.compile(r"[0-9a-z_.+\-*/%(), ]*")  # no strings, so that the parser has nothing to warn of
_GLUED: Final = re.compile(r"(?<![a-z_0-9])[0-9][0-9_.]*(?!e[+-]?[0-9])[a-z]")  # `2pi`

Number = int | float

_BINARY: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: Final[dict[str, tuple[Callable[..., Any], int]]] = {  # and how many arguments at most
    "abs": (abs, 1),
    "sqrt": (math.sqrt, 1),
    "exp": (math.exp, 1),
    "log": (math.log, 2),
    "log2": (math.log2, 1),
    "log10": (math.log10, 1),
    "sin": (math.sin, 1),
    "cos": (math.cos, 1),
    "tan": (math.tan, 1),
    "asin": (math.asin, 1),
    "acos": (math.acos, 1),
    "atan": (math.atan, 1),
    "floor": (math.floor, 1),
    "ceil": (math.ceil, 1),
    "round": (round, 1),
    "min": (min, 100),
    "max": (max, 100),
    "gcd": (math.gcd, 2),
}
_CONSTANTS: Final = {"pi": math.pi, "e": math.e}

SCHEMA: Final = function_schema(
    "calculator",
    "Compute the value of an arithmetic expression.",
    {
        "expression": {
            "type": "string",
            "description": "Numbers with + - * / // % ** and parentheses, functions such as sqrt and round, pi and e.",
        }
    },
    "expression",
)


class CalculationError(ValueError):
    """An expression that has no value; the message tells the model why."""


def calculate(expression: str) -> Number:
    """Return the value of an expression; `^` is a power and the printed signs of times, divide and minus are read.

    Raises CalculationError for everything else: unknown names, division by zero, results that are not finite, whole
    numbers above 4096 bits, expressions above 1,000 characters.
    """
    text = expression.strip().lower()
    for sign, plain in (("^", "**"), ("\u00d7", "*"), ("\u00f7", "/"), ("\u2212", "-"), ("\n", " ")):
        text = text.replace(sign, plain)
    if not text or len(text) > _MAX_CHARACTERS:
        raise CalculationError(f"an expression has 1 to {_MAX_CHARACTERS} characters")
    if not _ALLOWED.fullmatch(text) or _GLUED.search(text):
        raise CalculationError("only numbers, + - * / // % ** ( ) and functions such as sqrt(2) can be computed")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, 0)
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError, ZeroDivisionError, TypeError) as error:
        raise CalculationError(str(error).partition(" (<unknown>")[0] or "it cannot be read") from error


def calculator_tool(config: Mapping[str, Any], resources: ToolResources) -> StatelessTool:  # noqa: ARG001 - as registered
    """Return the tool `calculator`, which has no settings."""
    check_settings(config, (), "the tool calculator")
    return StatelessTool(SCHEMA, _call)


def _call(_prompt: Prompt, arguments: Mapping[str, Any]) -> ToolAnswer:
    try:
        return ToolAnswer(text=str(calculate(str(arguments.get("expression", "")))))
    except CalculationError as error:
        return failed(f"the expression cannot be computed: {error}")


def _value(node: ast.expr, depth: int) -> Number:
    if depth > _MAX_DEPTH:
        raise CalculationError("too many parentheses")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, depth + 1)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_value(left, depth + 1), _value(right, depth + 1)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left, depth + 1), _value(right, depth + 1)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            function, most = _FUNCTIONS[name]
            if len(arguments) > most:
                raise CalculationError(f"{name} takes at most {most} arguments")
            return _bounded(function(*(_value(argument, depth + 1) for argument in arguments)))
    raise CalculationError("only numbers, operators and known functions can be computed")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
        if base.bit_length() * abs(exponent) > _MAX_BITS:
            raise CalculationError("the power is too large")
    elif isinstance(exponent, int) and exponent.bit_length() > 64:
        raise CalculationError("the exponent is too large")
    return base**exponent


def _bounded(value: Any) -> Number:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise CalculationError("the number is too large")
    if isinstance(value, complex) or not math.isfinite(value):
        raise CalculationError("the result is no real number")
    return value
