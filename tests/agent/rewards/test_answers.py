"""Answers in words, grids and forms, and several rules at once."""

from typing import Any

import pytest

from vrl.agent.rewards.arc import read_grid
from vrl.agent.rewards.registry import find_rule
from vrl.agent.rewards.text_match import normalized, token_f1
from vrl.agent.rewards.types import RewardSpec
from vrl.agent.rewards.user import load_user_function
from vrl.protocol.errors import ConfigError


def returned(rule: str, text: str, truth: Any, **kwargs: Any) -> Any:
    return find_rule(rule)(data_source=rule, solution_str=text, ground_truth=truth, extra_info=None, **kwargs)


@pytest.mark.parametrize(
    ("text", "truth", "f1"),
    [
        ("the Eiffel Tower", "Eiffel Tower", 1.0),
        ("Eiffel tower, in Paris.", "The Eiffel-Tower", 0.0),  # the hyphen joins
        ("tower in Paris", "the tower of London", 2 * (1 / 3) * (1 / 3) / (2 / 3)),
        ("a a b", "a b b", 1 * 2 * (1 / 1) * (1 / 2) / (3 / 2)),  # `a` is an article: b against b b
        ("cat cat dog", "cat dog dog", 2 * (2 / 3) * (2 / 3) / (4 / 3)),
        ("", "", 1.0),
        ("the", "an", 1.0),
        ("", "cat", 0.0),
        ("cat", "dog", 0.0),
    ],
)
def test_f1_of_words(text: str, truth: str, f1: float) -> None:
    assert token_f1(text, truth) == pytest.approx(f1)
    assert token_f1(truth, text) == pytest.approx(f1)


def test_normalisation_is_squads() -> None:
    assert normalized("  The  cat's -- hat, an\tEND!") == "cats hat end"
    assert normalized("anthem theatre a.") == "anthem theatre"


@pytest.mark.parametrize(
    ("rule", "text", "truth", "score"),
    [
        ("exact_match", "Paris.", "paris", 1),
        ("exact_match", "<think>London</think>Paris", "Paris", 1),
        ("exact_match", "It is Paris", "Paris", 0),
        ("exact_match", "It is <answer>the Paris</answer>", ["Rome", "Paris"], 1),
        ("exact_match", "17", 17, 1),
        ("searchR1_nq", "<answer>Paris</answer>", {"target": ["Paris", "City of Light"]}, 1),
        ("searchR1_hotpotqa", "Paris", {"target": ["Paris"]}, 0),
        ("searchR1_nq", "", {"target": ["Paris"]}, 0),
    ],
)
def test_exact_match(rule: str, text: str, truth: Any, score: float) -> None:
    assert returned(rule, text, truth) == score


def test_the_best_of_several_answers_counts() -> None:
    assert returned("token_f1", "New York City", ["York", "New York"]) == {"score": pytest.approx(0.8), "acc": 0.0}
    with pytest.raises(ValueError, match="holds no answer"):
        returned("exact_match", "x", {"target": []})


GOOD = "<think>\nso\n</think>\n<answer>4</answer>\n"


@pytest.mark.parametrize(
    ("text", "settings", "score"),
    [
        (GOOD, {}, 1),
        ("<think></think> <tool_call>x</tool_call> <answer></answer>", {}, 1),
        (GOOD + "and more", {}, 0),
        ("First: " + GOOD, {}, 0),
        ("First: " + GOOD, {"only_tags": False}, 1),
        (GOOD + GOOD, {}, 0),
        ("<answer>4</answer><think>so</think>", {}, 0),
        ("<think><answer></think></answer>", {}, 0),
        ("<think>so<answer>4</answer>", {}, 0),
        ("<answer>4</answer>", {"tags": "answer"}, 1),
        ("", {}, 0),
    ],
)
def test_format(text: str, settings: dict[str, Any], score: float) -> None:
    assert returned("format", text, None, **settings) == score


GRID = [[1, 0, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("[[1, 0, 2], [3, 4, 5]]", GRID),
        ("First [[9]] but then\n[ [1,0,2],\n [3,4,5] ] I say.", GRID),
        ("The grid:\n1 0 2\n3 4 5\n", GRID),
        ("102\n345", GRID),
        ("| 1 | 0 | 2 |\n| 3 | 4 | 5 |", GRID),
        ("9 9\n1 0 2\n3 4 5\nThis is it.", GRID),
        ("[1, 0, 2]\n[3, 4, 5]", GRID),
        ("[[1, 0], [3]]", None),
        ("[[1, 0.5]]", None),
        ("[[" * 5000, None),
        ("no grid", None),
        ("", None),
    ],
)
def test_grids(text: str, grid: Any) -> None:
    assert read_grid(text) == grid


def test_arc() -> None:
    right = {"score": 1.0, "acc": 1.0, "cell_accuracy": 1.0, "has_grid": 1.0}
    assert returned("arc/training", "<answer>[[1,0,2],[3,4,5]]</answer>", GRID) == right
    assert returned("arc", "102\n345", "[[1,0,2],[3,4,5]]") == right
    near = returned("arc", "[[1,0,2],[3,4,6]]", GRID)
    assert (near["score"], near["acc"], near["cell_accuracy"]) == (0.0, 0.0, pytest.approx(5 / 6))
    assert returned("arc", "[[1,0,2],[3,4,6]]", GRID, partial=True)["score"] == pytest.approx(5 / 6)
    assert returned("arc", "[[1,0],[3,4]]", GRID, partial=True)["score"] == 0.0
    with pytest.raises(ValueError, match="no grid"):
        returned("arc", "1", [[1], [1, 2]])


def test_parts_are_weighted_added_and_kept() -> None:
    parts = [
        {"rule": "token_f1", "weight": 0.5},
        {"rule": "format", "weight": 0.2, "name": "form", "kwargs": {"tags": ["answer"]}},
        {"rule": "exact_match", "weight": -1.0},
    ]
    result = returned("combined", "<answer>New York City</answer>", "New York", parts=parts)
    assert result == {
        "score": pytest.approx(0.5 * 0.8 + 0.2),
        "token_f1": pytest.approx(0.4),
        "token_f1/score": pytest.approx(0.8),
        "token_f1/acc": 0.0,
        "form": 0.2,
        "form/score": 1.0,
        "exact_match": 0.0,
        "exact_match/score": 0.0,
    }
    for wrong, message in (([], "needs reward_kwargs.parts"), ([parts[0]] * 2, "two parts"), ([{"rule": "x"}], "'x'")):
        with pytest.raises(ConfigError, match=message):
            returned("combined", "x", "x", parts=wrong)


def test_a_built_in_rule_for_every_row() -> None:
    function = load_user_function(RewardSpec(function_path="vrl:exact_match"))
    assert function(data_source="anything", solution_str="Paris", ground_truth="Paris", extra_info=None) == 1.0
    with pytest.raises(ConfigError, match="no reward rule for data source 'exactly'"):
        load_user_function(RewardSpec(function_path="vrl:exactly"))


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        ("combined", {}, "needs parts"),
        ("combined", {"parts": [{"rule": "exactly"}]}, "no reward rule for data source 'exactly'"),
        ("combined", {"parts": [{"weight": 1.0}]}, r"parts\[0\] names no rule"),
        ("combined", {"parts": [{"rule": "arc", "kwargs": {"partal": True}}]}, "Did you mean partial"),
        ("llm_judge", {"base_urll": "http://x/v1", "model": "m"}, "Did you mean base_url"),
        ("llm_judge", {"model": "m"}, "needs base_url"),
        ("code_tests", {"continous": True}, "Did you mean continuous"),
        ("tiny/visual", {"x": 1}, "has no setting 'x'. It has: none"),
    ],
)
def test_settings_that_a_built_in_rule_does_not_have(rule: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_user_function(RewardSpec(function_path=f"vrl:{rule}", function_kwargs=settings))
