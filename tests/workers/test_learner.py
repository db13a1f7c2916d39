"""One update of the learner is the same however its rows are cut: over ranks, micro-batches, budgets, shared rows."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.workers.invariance import ADAPTERS, GROUPS, MERGED, WAYS, WHOLE, Measured, Way, deviations, run_ways, table
from tests.workers.rig import build_tiny

KINDS = ("qwen2", "qwen2_5_vl")
BOUND = 1e-5
PAGE = Path(__file__).parents[2] / "docs" / "results" / "invariance.md"


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measured]:
    """All ways for both kinds of model; four ranks for the text model only."""
    root = tmp_path_factory.mktemp("ways")
    folders = {kind: build_tiny(kind, root) for kind in KINDS}
    out: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in KINDS}
    for world in (1, 2, 4):
        ways = [way for way in (WHOLE, *WAYS, *GROUPS, MERGED, *ADAPTERS) if way.world == world]
        chosen = folders if world < 4 else {"qwen2": folders["qwen2"]}
        for kind, found in run_ways(chosen, world, ways, root / f"world{world}.json").items():
            out[kind] |= found
    return dict(out)


@pytest.fixture(params=KINDS)
def measured(request: pytest.FixtureRequest, everything: dict[str, Measured]) -> Measured:
    return everything[request.param]


def check(measured: Measured, way: Way) -> None:
    whole, found = measured[way.compared_with], measured[way.name]
    for name, apart in deviations(way, measured).items():
        assert apart < BOUND, name
    if way.compared_with != MERGED.name:
        assert found["moved"] == pytest.approx(whole["moved"], rel=BOUND)
    assert whole["actor/grad_norm"] > 1e-3  # there was something to compare
    assert whole["moved"] > 0


@pytest.mark.dist
@pytest.mark.parametrize("way", [*WAYS, *ADAPTERS], ids=lambda way: way.name)
def test_cutting_the_batch_changes_nothing(measured: Measured, way: Way) -> None:
    check(measured, way)


@pytest.mark.dist
@pytest.mark.parametrize("way", GROUPS, ids=lambda way: way.name)
def test_groups_of_ranks_change_nothing(everything: dict[str, Measured], way: Way) -> None:
    check(everything["qwen2"], way)


@pytest.mark.dist
def test_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(measured: Measured) -> None:
    for found in measured.values():
        assert found["skipped"] == 1.0
        assert found["moved_by_skipped"] == 0.0
        assert found["moved_after_skipped"] > 0.0


@pytest.mark.dist
def test_the_page_in_the_docs_has_all_ways_within_the_bound(everything: dict[str, Measured]) -> None:
    if os.environ.get("VRL_WRITE_TABLES"):
        PAGE.write_text(table(everything))
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if re.match(r"\| .*e[-+]\d\d", line)]
    ways = [*WAYS, *GROUPS, *ADAPTERS]
    names = [way.name for measured in everything.values() for way in ways if way.name in measured]
    assert [row[0].strip() for row in rows] == names
    assert all(figure.strip() == "-" or float(figure) < BOUND for row in rows for figure in row[1:])
