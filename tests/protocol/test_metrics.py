"""Metrics of all ranks become one by the rule that stands in their name."""

import math
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest

from vrl.protocol.metrics import as_number, reduce_metrics

NAN = math.nan


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("actor/pg_loss", 2.0),
        ("critic/score/mean", 2.0),
        ("timing_s/update_actor", 4.0),
        ("timing_s/mean", 4.0),  # a stage lasts as long as its slowest rank
        ("response_length/max", 4.0),
        ("training/rollout_probs_diff_max", 4.0),
        ("perf/max_memory_allocated_gb", 4.0),  # the peak of all ranks
        ("response_length/min", 0.5),
        ("critic/score_min", 0.5),
        ("rollout/tokens_sum", 6.0),
        ("update/skipped_steps_count", 6.0),
        ("actor/maximal_thing", 2.0),  # only whole words decide
        ("actor/discount", 2.0),
        ("actor/resum", 2.0),
    ],
)
def test_values_of_all_ranks_count(name: str, expected: float) -> None:
    for values in permutations([1.5, 0.5, 4.0]):
        assert reduce_metrics([{name: value} for value in values]) == {name: pytest.approx(expected)}


def test_a_metric_that_only_some_ranks_have() -> None:
    parts = [{}, {"env/score": 1.0}, {"env/score": 3.0, "env/turns_sum": 2.0}]
    assert reduce_metrics(parts) == {"env/score": 2.0, "env/turns_sum": 2.0}


def test_a_number_that_is_not_finite_on_any_rank_shows() -> None:
    for name in ("grad_norm", "diff_max", "diff_min", "timing_s/step", "tokens_sum"):
        for values in ([NAN, 1.0], [1.0, NAN], [2.0, NAN, 1.0]):
            assert math.isnan(reduce_metrics([{name: value} for value in values])[name]), (name, values)
    assert reduce_metrics([{"grad_norm": 1.0}, {"grad_norm": math.inf}])["grad_norm"] == math.inf


def test_nothing_in_nothing_out_and_inputs_unchanged() -> None:
    assert reduce_metrics([]) == {}
    assert reduce_metrics([{}, {}]) == {}
    parts = [{"a": 1.0}, {"a": 2.0}]
    reduce_metrics(parts)
    assert parts == [{"a": 1.0}, {"a": 2.0}]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0), (3, 3.0), (0.5, 0.5), (Fraction(1, 4), 0.25), (np.float32(2), 2.0), (-(10**299), -1e299),
        (10**400, None), (-1e308, None), (math.inf, None), (NAN, None), ("3", None), (None, None), ([1], None),
        (1j, None),
    ],
)  # fmt: skip
def test_a_number_is_finite_and_can_be_added_up(value: object, number: float | None):
    assert as_number(value) == number
