"""The rule of MATH: the last boxed answer."""

from typing import Any

from vrl.agent.rewards.boxed import last_boxed, same_answer
from vrl.agent.rewards.registry import register_reward


@register_reward("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
def compute_score(*, solution_str: str, ground_truth: Any, **_: Any) -> float:
    r"""Return 1 when the last `\boxed{...}` means the same as the ground truth, else 0."""
    answer = last_boxed(solution_str)
    return float(answer is not None and same_answer(answer, str(ground_truth)))
