"""Whether a response has the form that was asked for."""

from collections.abc import Sequence
from typing import Any

from vrl.agent.rewards.registry import register_reward


def has_format(text: str, tags: Sequence[str], *, only_tags: bool = True) -> bool:
    """Tell whether each tag is opened and closed once, one pair after the other in this order.

    With `only_tags` nothing but space stands outside the last pair and before the first; text between pairs (tool
    calls, observations) is free.
    """
    position, first, last = 0, 0, 0
    for number, tag in enumerate(tags):
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return False
        opened = text.find(opening, position)
        closed = text.find(closing, opened)
        if opened < 0 or closed < 0:
            return False
        first = opened if number == 0 else first
        position = last = closed + len(closing)
    return not only_tags or not (text[:first] + text[last:]).strip()


@register_reward("format")
def compute_score(
    *, solution_str: str, tags: Sequence[str] = ("think", "answer"), only_tags: bool = True, **_: Any
) -> float:
    """Return 1 when the response has the tags in their form, else 0; a bare string is one tag."""
    wanted = [tags] if isinstance(tags, str) else list(tags)
    return float(has_format(solution_str, wanted, only_tags=only_tags))
