"""Where an answer stands in a text: inside the last `<answer>` tag, or all that is no thought."""

from collections.abc import Sequence
from typing import Any

from vrl.agent.parsers.answer import last_answer
from vrl.agent.parsers.thinking import without_thoughts


def read_answer(text: str, *, require_tag: bool = False) -> str | None:
    """Return the answer, outer space cut; without a tag the text that is no thought, or None where one is required."""
    answer = last_answer(text)
    if answer is not None:
        return answer
    return None if require_tag else without_thoughts(text).strip()


def true_answers(ground_truth: Any) -> list[str]:
    """Return the accepted answers of a ground truth: one, a list of them, or Search-R1's `{"target": [...]}`.

    Raises ValueError when there is none.
    """
    if isinstance(ground_truth, dict):
        ground_truth = ground_truth.get("target")
    if isinstance(ground_truth, str) or not isinstance(ground_truth, Sequence):
        ground_truth = [] if ground_truth is None else [ground_truth]
    answers = [str(answer) for answer in ground_truth]
    if not answers:
        raise ValueError("the ground truth holds no answer")
    return answers
