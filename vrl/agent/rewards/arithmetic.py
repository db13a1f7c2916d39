"""The rule of sums from reasoning-gym, for models that answer in sentences: the last number in the text counts."""

from typing import Any

from vrl.agent.rewards.number_text import last_number, read_number
from vrl.agent.rewards.registry import register_reward


@register_reward("reasoning_gym/*")
def compute_score(*, data_source: str, solution_str: str, ground_truth: Any, **_: Any) -> float:
    """Return 1 when the last number in the text equals the ground truth, else 0.

    Raises ValueError when the ground truth is no number.
    """
    truth = read_number(str(ground_truth))
    if truth is None:
        raise ValueError(
            f"{data_source}: the ground truth {ground_truth!r} is not a number; this rule scores sums. "
            "For another task set custom_reward_function.path."
        )
    return float(last_number(solution_str) == truth)
