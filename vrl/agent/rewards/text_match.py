"""Answers in words: exact match and F1 of words, after SQuAD's normalisation (Rajpurkar et al., arXiv 1606.05250)."""

import re
import string
from collections import Counter
from typing import Any

from vrl.agent.rewards.answers import read_answer, true_answers
from vrl.agent.rewards.registry import register_reward

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


def normalized(text: str) -> str:
    """Return a text in lower case without punctuation, articles and extra space."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact(answer: str, truth: str) -> float:
    """Return 1 when both are the same after normalisation, else 0."""
    return float(normalized(answer) == normalized(truth))


def token_f1(answer: str, truth: str) -> float:
    """Return the harmonic mean of precision and recall of words, each counted as often as it stands there.

    Where one side has no words: 1 when both have none, else 0.
    """
    said, wanted = normalized(answer).split(), normalized(truth).split()
    if not said or not wanted:
        return float(said == wanted)
    common = sum((Counter(said) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


@register_reward("exact_match")
def exact_match(*, solution_str: str, ground_truth: Any, require_tag: bool = False, **_: Any) -> float:
    """Return 1 when the answer matches one of the accepted ones exactly, else 0."""
    answer = read_answer(solution_str, require_tag=require_tag)
    return 0.0 if answer is None else max(exact(answer, truth) for truth in true_answers(ground_truth))


@register_reward("token_f1")
def best_f1(*, solution_str: str, ground_truth: Any, require_tag: bool = False, **_: Any) -> dict[str, float]:
    """Return the F1 with the accepted answer that fits best, and the exact match as `acc`."""
    answer, truths = read_answer(solution_str, require_tag=require_tag), true_answers(ground_truth)
    if answer is None:
        return {"score": 0.0, "acc": 0.0}
    return {
        "score": max(token_f1(answer, truth) for truth in truths),
        "acc": max(exact(answer, truth) for truth in truths),
    }


@register_reward("searchR1_*")
def search_r1(*, solution_str: str, ground_truth: Any, **_: Any) -> float:
    """Return the exact match of what stands in `<answer>` tags; without them 0, as in Search-R1."""
    return exact_match(solution_str=solution_str, ground_truth=ground_truth, require_tag=True)
