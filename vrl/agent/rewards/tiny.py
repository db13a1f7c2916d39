"""The rule of the tiny tasks: the answer is a word or a number, and nothing else."""

from typing import Any

from vrl.agent.rewards.registry import register_reward

_OPEN, _CLOSE = "<answer>", "</answer>"


@register_reward("tiny/visual", "tiny/arithmetic", "tiny/code", "tiny/zoom")
def compute_score(*, solution_str: str, ground_truth: Any, **_: Any) -> float:
    """Return 1 when the text, or the inside of its last `<answer>` tag, equals the ground truth; outer space is cut."""
    before, closed, _after = solution_str.rpartition(_CLOSE)
    _before, opened, inside = before.rpartition(_OPEN)
    answer = inside if closed and opened else solution_str
    return float(answer.strip() == str(ground_truth).strip())
