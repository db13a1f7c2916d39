"""Partitions by tokens: every row once, as even as the public algorithm, within the budget."""

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vrl.protocol.balance import (
    RowPrompt,
    in_order,
    micro_batches,
    partition,
    prompt_units,
    rows_of,
    unit_sums,
    units_of,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "seqlen_balance.json").read_text())
BATCHES = {batch["id"]: batch["lengths"] for batch in GOLDEN["batches"]}
CASES = [case for case in GOLDEN["cases"] if not case.get("expected_error")]
REFUSED_BY_PEER = [case for case in GOLDEN["cases"] if case.get("expected_error")]
LENGTHS = st.lists(st.integers(0, 300), max_size=40)
checked = settings(deadline=None, max_examples=150, derandomize=True)


def loads(parts: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for i in part) for part in parts]


def assert_every_row_once(parts: list[list[int]], rows: int) -> None:
    assert sorted(i for part in parts for i in part) == list(range(rows))


def log_normal(rows: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [max(32, min(16384, int(rng.lognormvariate(7.0, 1.0)))) for _ in range(rows)]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_never_worse_than_the_public_partition(case: dict[str, Any]) -> None:
    lengths = BATCHES[case["batch"]]
    parts = partition(lengths, case["k"], equal_counts=case["equal_size"])
    assert_every_row_once(parts, len(lengths))
    assert len(parts) == case["k"]
    assert all(parts)
    if case["equal_size"]:
        assert len({len(part) for part in parts}) == 1
    assert case["lower_bound"] <= max(loads(parts, lengths)) <= case["peer_makespan"]


@pytest.mark.parametrize("case", REFUSED_BY_PEER, ids=[case["id"] for case in REFUSED_BY_PEER])
def test_counts_that_do_not_divide_differ_by_one_and_parts_may_be_empty(case: dict[str, Any]) -> None:
    parts = partition(case["lengths"], case["k"], equal_counts=case["equal_size"])
    assert_every_row_once(parts, len(case["lengths"]))
    counts = sorted(len(part) for part in parts)
    assert counts == ([0, 1, 1, 1] if case["id"] == "serr0" else [2, 3])


@checked
@given(LENGTHS, st.integers(1, 9), st.booleans())
def test_a_partition_covers_every_row_once(lengths: list[int], parts_wanted: int, equal: bool) -> None:
    before = list(lengths)
    parts = partition(lengths, parts_wanted, equal_counts=equal)
    assert lengths == before
    assert len(parts) == parts_wanted
    assert_every_row_once(parts, len(lengths))
    assert all(part == sorted(part) for part in parts)
    assert sum(1 for part in parts if not part) == max(0, parts_wanted - len(lengths))
    counts = [len(part) for part in parts]
    assert not equal or max(counts) - min(counts) <= 1
    assert parts == partition(lengths, parts_wanted, equal_counts=equal)


@checked
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(1, 9))
def test_free_counts_are_within_the_greedy_bound(lengths: list[int], parts_wanted: int) -> None:
    heaviest = max(loads(partition(lengths, parts_wanted), lengths))
    assert heaviest <= sum(lengths) / parts_wanted + max(lengths)
    assert heaviest >= max(max(lengths), -(-sum(lengths) // parts_wanted))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(2, 3))
def test_small_lists_are_near_the_optimum(lengths: list[int], parts_wanted: int) -> None:
    best = min(
        max(sum(length for length, part in zip(lengths, choice, strict=True) if part == k) for k in range(parts_wanted))
        for choice in product(range(parts_wanted), repeat=len(lengths))
    )
    assert max(loads(partition(lengths, parts_wanted), lengths)) <= best * 7 / 6  # largest differencing, few parts


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize(("rows", "parts_wanted"), [(1024, 8), (1024, 64), (2048, 64)])
def test_realistic_lengths_leave_no_rank_waiting(rows: int, parts_wanted: int, equal: bool) -> None:
    lengths = log_normal(rows, seed=rows + parts_wanted)
    heaviest = max(loads(partition(lengths, parts_wanted, equal_counts=equal), lengths))
    ideal = max(max(lengths), sum(lengths) / parts_wanted)
    assert heaviest <= 1.005 * ideal


def test_empty_rows_do_not_crowd_into_one_part() -> None:
    assert all(partition([5, 0, 0, 0], 3))
    assert all(partition([0] * 9, 4))


@pytest.mark.parametrize("parts_wanted", [0, -1])
def test_no_parts_is_an_error(parts_wanted: int) -> None:
    with pytest.raises(ValueError, match=f"{parts_wanted} parts"):
        partition([1, 2], parts_wanted)


@checked
@given(LENGTHS, st.integers(1, 400), st.integers(1, 8))
def test_micro_batches_keep_the_budget(lengths: list[int], max_tokens: int, at_least: int) -> None:
    plan = micro_batches(lengths, max_tokens, at_least)
    assert_every_row_once(plan, len(lengths))
    assert len(plan) >= at_least
    for part in plan:
        assert sum(lengths[i] for i in part) <= max_tokens or len(part) == 1


@checked
@given(LENGTHS, st.integers(100, 400))
def test_micro_batches_are_few(lengths: list[int], max_tokens: int) -> None:
    # First fit needs at most 1.7 bins for each of the optimum; half-full bins would need two.
    plan = micro_batches(lengths, max_tokens)
    short = [length for length in lengths if length <= max_tokens]
    assert len(plan) <= max(1, len(lengths) - len(short) + max(bool(short), 2 * -(-sum(short) // max_tokens)))


@checked
@given(LENGTHS, st.integers(100, 400), st.integers(0, 5))
def test_all_ranks_can_run_the_same_number(lengths: list[int], max_tokens: int, more: int) -> None:
    wanted = len(micro_batches(lengths, max_tokens)) + more
    assert len(micro_batches(lengths, max_tokens, at_least=wanted)) == wanted


def test_a_row_above_the_budget_stands_alone_and_the_rest_is_packed() -> None:
    plan = micro_batches([10, 500, 20, 30], 60)
    assert sorted(plan) == [[0, 2, 3], [1]]
    assert micro_batches([500], 60) == [[0]]


def test_without_rows_all_micro_batches_are_empty() -> None:
    assert micro_batches([], 100) == [[]]
    assert micro_batches([], 100, at_least=3) == [[], [], []]


@pytest.mark.parametrize("max_tokens", [0, -5])
def test_a_budget_below_one_token_is_an_error(max_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_tokens.*{max_tokens}"):
        micro_batches([1, 2], max_tokens)


def test_rows_that_waste_half_the_budget_are_planned_at_once() -> None:
    # Two such rows fit a micro-batch, while the sum promises two and a half: counting upwards takes half a minute.
    lengths = [400 + i % 20 for i in range(512)]
    plan = micro_batches(lengths, 1000)
    assert len(plan) == 256
    assert len(micro_batches([600 + i % 20 for i in range(512)], 1000)) == 512


# -- rows that stay together -------------------------------------------------------------------------------------------


@checked
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), max_size=24), st.integers(1, 120), st.integers(1, 8))
def test_units_are_cut_whole_within_the_limit_or_alone(
    rows: list[tuple[int, int]], max_tokens: int, max_rows: int
) -> None:
    groups, lengths = [group for group, _ in rows], [length for _, length in rows]
    units = units_of(groups)
    assert [groups[unit[0]] for unit in units] == list(dict.fromkeys(groups))
    tokens = unit_sums(units, lengths)
    for plan, sizes, limit in (
        (micro_batches(tokens, max_tokens), tokens, max_tokens),
        (in_order([len(unit) for unit in units], max_rows), [len(unit) for unit in units], max_rows),
    ):
        parts = rows_of(units, plan)
        assert_every_row_once(parts, len(rows))
        assert all(part == sorted(part) for part in parts)
        for group in set(groups):
            assert sum(1 for part in parts if any(groups[row] == group for row in part)) == 1
        assert all(len(part) == 1 or sum(sizes[unit] for unit in part) <= limit for part in plan)


PROMPTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=24)


def begun(rows: list[tuple[int, int]]) -> tuple[list[int], list[RowPrompt]]:
    """Return lengths and prompts of rows given by the prompt's number and the tokens behind it."""
    prompts = [RowPrompt(number, 17 * number) for number, _ in rows]
    return [prompt.length + n for prompt, (_, n) in zip(prompts, rows, strict=True)], prompts


def computed(rows: list[int], lengths: list[int], prompts: list[RowPrompt]) -> int:
    return sum(lengths[i] - prompts[i].length for i in rows) + sum({p.number: p.length for p in (
        prompts[i] for i in rows)}.values())  # fmt: skip


@checked
@given(PROMPTS, st.integers(1, 150))
def test_rows_of_a_prompt_are_one_unit_where_they_fit(rows: list[tuple[int, int]], max_tokens: int) -> None:
    lengths, prompts = begun(rows)
    units = prompt_units(lengths, prompts, max_tokens)
    assert_every_row_once(units, len(rows))
    assert unit_sums(units, lengths, prompts) == [computed(unit, lengths, prompts) for unit in units]
    for unit in units:
        assert len({prompts[row].number for row in unit}) == 1
        sampled = [row for row in unit if lengths[row] > prompts[row].length]
        assert computed(unit, lengths, prompts) <= max_tokens or len(sampled) <= 1
    for number in {prompt.number for prompt in prompts}:
        together = [row for row, prompt in enumerate(prompts) if prompt.number == number]
        if computed(together, lengths, prompts) <= max_tokens:
            assert together in units


def test_a_group_above_the_budget_is_cut_into_few_parts_that_fit() -> None:
    prompts = [RowPrompt(7, 50)] * 6
    units = prompt_units([80] * 6, prompts, 120)  # a prompt of 50 leaves room for two remainders of 30
    assert sorted(map(len, units)) == [2, 2, 2]
    assert unit_sums(units, [80] * 6, prompts) == [110] * 3
    assert sorted(map(len, prompt_units([80] * 6, prompts, 60))) == [1] * 6


def test_units_in_order_fill_up_before_the_next_begins() -> None:
    assert in_order([1] * 7, 3) == [[0, 1, 2], [3, 4, 5], [6]]
    assert in_order([2, 2, 1, 5, 1], 3) == [[0], [1, 2], [3], [4]]
    assert in_order([], 3) == []
