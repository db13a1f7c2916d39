"""Validation metrics equal the golden tables, and what is counted is exactly the rows of the validation set."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import pytest

from vrl.controller.validation_metrics import sample_statistics, validation_metrics

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "val_metrics.json").read_text())["cases"]


def metrics_of(case: dict) -> dict[str, float]:
    rows = range(len(case["sample_uids"]))
    extras = [{name: case["infos"][name][row] for name in case["infos"] if name != "reward"} for row in rows]
    return validation_metrics(
        data_sources=case["data_sources"], uids=case["sample_uids"], scores=case["infos"]["reward"], extras=extras
    )


def flat(table: dict) -> dict[str, float]:
    return {
        f"{source}/{variable}/{metric}": value
        for source, variables in table.items()
        for variable, metrics in variables.items()
        for metric, value in metrics.items()
    }


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['id']}-{case['flavor']}")
def test_golden_tables(case: dict):
    expected = {name: value for name, value in flat(case["exact"]).items() if not name.endswith("without_replacement")}
    found = {name.partition("/")[2]: value for name, value in metrics_of(case).items()}
    assert expected
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["id"])
def test_the_exact_spread_is_what_drawing_gives(case: dict):
    """The published implementation draws 1000 times; its standard deviations are those of the exact values, roughly."""
    drawn = flat(case["peer"])
    found = {name.partition("/")[2]: value for name, value in metrics_of(case).items()}
    for name in drawn:
        if name.endswith("/mean"):
            spread = found[name.removesuffix("mean") + "std"]
            assert found[name] == pytest.approx(drawn[name], abs=5 * spread / math.sqrt(1000) + 1e-9)
        elif name.endswith("/std"):
            assert found[name] == pytest.approx(drawn[name], rel=0.35, abs=0.05)
        else:
            assert found[name] == pytest.approx(drawn[name], rel=1e-9, abs=1e-9)


def test_the_names_are_the_published_ones():
    case = next(case for case in GOLDEN if case["flavor"] == "with_pred" and len(set(case["sample_uids"])) == 3)
    core = {name for name in metrics_of(case) if name.startswith("val-core/")}
    assert core == {f"val-core/math/acc/{metric}" for metric in ("mean@4", "best@4/mean", "best@4/std")} | {
        "val-core/math/acc/maj@4/mean",
        "val-core/math/acc/maj@4/std",
    }
    names = {name.partition("/")[2] for name in metrics_of(case)}
    assert names == {*flat(case["peer"]), "math/num_rows", "math/failed_rows"}


def test_reward_is_the_core_without_an_accuracy():
    metrics = validation_metrics(data_sources=["a"], uids=["u"], scores=[1.0], extras=[{"format": 0.5}])
    assert metrics["val-core/a/reward/mean@1"] == 1.0
    assert metrics["val-aux/a/format/mean@1"] == 0.5


def vote_by_enumeration(values: list[float], predictions: list[str], draws: int) -> float:
    total = 0.0
    for chosen in itertools.product(range(len(values)), repeat=draws):
        counts = Counter(predictions[i] for i in chosen)
        best = max(counts.values())
        total += values[next(i for i in chosen if counts[predictions[i]] == best)]
    return total / len(values) ** draws


@pytest.mark.parametrize("predictions", ["abcde", "aabbc", "aaabc", "aabb", "abbb"])
def test_the_vote_equals_enumeration(predictions: str):
    values = [0.1, 0.7, 0.2, 0.9, 0.4][: len(predictions)]
    found = sample_statistics(values, list(predictions), len(predictions))
    for draws in (2, 4, len(predictions)):
        expected = vote_by_enumeration(values, list(predictions), draws)
        assert found[f"maj@{draws}/mean"] == pytest.approx(expected, rel=1e-12)


def test_the_vote_of_many_samples_is_quick_and_sound():
    texts = [str(i * i % 23) for i in range(64)]
    found = sample_statistics([float(text == "1") for text in texts], texts, 64)
    assert 0.0 < found["maj@64/mean"] < 1.0


def test_five_prompts_give_the_mean_of_five():
    metrics = validation_metrics(
        data_sources=["a"] * 5, uids=list("12345"), scores=[1, 1, 0, 0, 0], extras=[{} for _ in range(5)]
    )
    assert metrics["val-core/a/reward/mean@1"] == pytest.approx(0.4)
    assert metrics["val-aux/a/num_rows"] == 5


def test_sources_and_several_samples_a_prompt_are_kept_apart():
    metrics = validation_metrics(
        data_sources=["a", "a", "b", "b", "b", "b"],
        uids=["1", "1", "2", "2", "3", "3"],
        scores=[1.0, 0.0, 1.0, 1.0, 0.0, 1.0],
        extras=[{} for _ in range(6)],
        num_turns=[1, 2, 3, 1, 1, 4],
    )
    assert metrics["val-core/a/reward/mean@2"] == 0.5
    assert metrics["val-core/b/reward/mean@2"] == 0.75
    assert metrics["val-aux/b/num_rows"] == 4
    assert (metrics["val-aux/num_turns/min"], metrics["val-aux/num_turns/max"]) == (1, 4)


def test_a_failed_row_is_counted_and_left_out():
    extras = [{"acc": 1.0}, {"failure": "reward raised: ..."}, {"acc": 1.0}, {"acc": 0.0}]
    metrics = validation_metrics(
        data_sources=["a"] * 4, uids=["1", "1", "2", "2"], scores=[1.0, None, 1.0, 0.0], extras=extras
    )
    assert metrics["val-aux/a/failed_rows"] == 1
    assert metrics["val-core/a/acc/mean@2"] == 0.75
    assert not any("failure" in name or "@1" in name for name in metrics)


def test_only_failures_leave_the_counts():
    metrics = validation_metrics(data_sources=["a"], uids=["1"], scores=[None], extras=[{"failure": "x"}])
    assert metrics == {"val-aux/a/num_rows": 1.0, "val-aux/a/failed_rows": 1.0}


def test_an_extra_that_is_not_always_a_number_has_no_metric():
    extras = [{"x": 1, "y": True, "z": 1}, {"x": "no", "z": 10**400}]
    metrics = validation_metrics(data_sources=["a", "a"], uids=["1", "2"], scores=[1.0, 0.0], extras=extras)
    assert metrics["val-aux/a/y/mean@1"] == 1.0
    assert not any("/x/" in name or "/z/" in name for name in metrics)
