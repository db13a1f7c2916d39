"""The rule of gsm8k: one number after `####`."""

from fractions import Fraction
from typing import Any

from vrl.agent.rewards.number_text import first_number, last_number, read_number
from vrl.agent.rewards.registry import register_reward

_MARKER = "####"


@register_reward("openai/gsm8k")
def compute_score(
    *,
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
    **_: Any,
) -> float:
    """Return `score` for the right number, `format_score` for a wrong one and 0 where none is found.

    "strict" reads the first number after the last `####`, "flexible" the last number of the text. Numbers compare by
    exact value, so that separators, currency and trailing zeros do not matter. Raises ValueError for another method
    and for a ground truth that is no number.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method must be 'strict' or 'flexible', got {method!r}")
    truth = read_number(str(ground_truth))
    if truth is None:
        raise ValueError(f"gsm8k: the ground truth {ground_truth!r} is not a number")
    answer = last_number(solution_str) if method == "flexible" else _marked_number(solution_str)
    if answer is None:
        return 0.0
    return score if answer == truth else format_score


def _marked_number(text: str) -> Fraction | None:
    _, marker, after = text.rpartition(_MARKER)
    return first_number(after.lstrip().partition("\n")[0]) if marker else None
