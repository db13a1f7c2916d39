"""The rule of geometry3k: a boxed answer after a think block."""

from typing import Any

from vrl.agent.rewards.boxed import last_boxed, same_answer
from vrl.agent.rewards.registry import register_reward


@register_reward("hiyouga/geometry3k")
def compute_score(*, solution_str: str, ground_truth: Any, format_score: float = 0.1, **_: Any) -> dict[str, float]:
    r"""Return `score` = 0.9 acc + 0.1 format, with both parts beside it.

    format is 1 when the text is `<think>...</think>` followed by a `\boxed{...}`, acc is 1 when the last boxed answer
    is right.
    """
    answer = last_boxed(solution_str)
    acc = float(answer is not None and same_answer(answer, str(ground_truth)))
    well_formed = float(_thinks_then_answers(solution_str))
    return {"score": (1.0 - format_score) * acc + format_score * well_formed, "acc": acc, "format": well_formed}


def _thinks_then_answers(text: str) -> bool:
    _, closed, after = text.lstrip().removeprefix("<think>").partition("</think>")
    _, _, inside = after.partition(r"\boxed{")
    return text.lstrip().startswith("<think>") and bool(closed) and "}" in inside
