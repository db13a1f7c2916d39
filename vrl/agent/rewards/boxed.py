r"""The last `\boxed{...}` of a text, and its comparison with a ground truth. Used by the rules `math` and `geo3k`.

Two answers are equal when they read the same without layout, wrappers and units, when both are numbers of equal value,
or when sympy finds them equal. What is long or could keep sympy busy for minutes (towers of powers, factorials, huge
numbers) is compared as text only, and so is what takes sympy longer than five seconds.
"""

import logging
import re
from fractions import Fraction
from typing import Any

from math_verify import parse, verify
from sympy.core.cache import clear_cache

from vrl.agent.rewards.number_text import read_number
from vrl.agent.rewards.time_bound import within

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns on every process that its time limit is off

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_MAX_SYMBOLIC_CHARACTERS = 200
_MAX_SYMBOLIC_SECONDS = 5.0
_HARD_FOR_SYMPY = re.compile(
    r"\^\s*\{?\s*\w+\s*\}?\s*\^|\^\s*\{[^}]*(?:\^|[0-9]{3})|\^.*\^.*\^|\)\s*\^\s*\{?\s*[0-9]{2}|\*\*|[0-9]{16}|!|\\(?:sum|prod|int|lim|binom)"
)
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\\)\\(?:(?:left|right|displaystyle)(?![a-zA-Z])|[!;:, ])|\\?\$|~", ""),
        (r"\{,\}", ","),
        (r"\\[dt]frac", r"\\frac"),
        (r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}", r" \1 "),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree|\u00b0|\\?%", ""),
        (r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"^\s*[a-zA-Z]\s*=(?!=)", ""),
        (r"\^\s*\{\s*([0-9a-zA-Z])\s*\}", r"^\1"),
        (r"\u2212", "-"),
    )
)
_UNIT = r"degrees?|inch(?:es)?|f(?:oo|ee)t|ft|met(?:er|re)s?|[ckm]?m|in|units?|dollars?|cents?|k?g|s|hours?|minutes?"
_UNIT_AT_END = re.compile(rf"\s(?:square |sq )?(?:{_UNIT})\.?\s*(?:\^\s*\{{?[23]\}}?)?$")
_FRACTION = re.compile(r"(-?)\\frac\{(-?[0-9.]+)\}\{([0-9.]+)\}")
_LIST_COMMA = re.compile(r",(?![0-9]{3}(?![0-9]))")  # not a thousands separator


def last_boxed(text: str) -> str | None:
    r"""Return the inside of the last `\boxed{...}` or `\fbox{...}`, or the word after a bare `\boxed `.

    None when there is none or its brace is never closed.
    """
    starts = [match.end() for match in _BOX.finditer(text)]
    if not starts:
        return None
    rest = text[starts[-1] :]
    if not rest.startswith("{"):
        words = rest.split(maxsplit=1)
        return words[0].strip("$.") if words else None
    depth = 0
    for brace in re.finditer(r"(?<!\\)[{}]", rest):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return rest[1 : brace.start()]
    return None


def same_answer(answer: str, truth: str) -> bool:
    """Return whether a boxed answer and a ground truth mean the same. Nothing equals an empty answer."""
    answer, truth = _tidy(answer), _tidy(truth)
    if not answer:
        return False
    if _letters(answer) == _letters(truth):
        return True
    number, true_number = _number(answer), _number(truth)
    if number is not None and true_number is not None:
        return number == true_number
    if max(len(answer), len(truth)) > _MAX_SYMBOLIC_CHARACTERS or _HARD_FOR_SYMPY.search(answer):
        return False
    try:
        return within(_MAX_SYMBOLIC_SECONDS, lambda: verify(_parse(truth), _parse(answer), timeout_seconds=0))
    except TimeoutError:  # else a model could escape a zero: a row whose reward fails is left out
        clear_cache()  # a property of an expression may have been left half known
        return False


def _tidy(text: str) -> str:
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return _UNIT_AT_END.sub("", text.strip()).strip().rstrip(".")


def _letters(text: str) -> str:
    squeezed = re.sub(r"\s", "", text)
    return squeezed.casefold() if squeezed.isalpha() else squeezed


def _number(text: str) -> Fraction | None:
    fraction = _FRACTION.fullmatch(text)
    if fraction:
        text = "{}{}/{}".format(*fraction.groups())
    return None if _LIST_COMMA.search(text) else read_number(text)


def _parse(text: str) -> list[Any]:
    return parse(f"${text}$", parsing_timeout=0)
