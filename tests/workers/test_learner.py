"""One update of the learner is the same however its rows are cut: over ranks, micro-batches, budgets, shared rows."""

import os
import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.workers.invariance import ADAPTERS, GROUPS, MERGED, WAYS, WHOLE, Measured, Way, deviations, run_ways, table
from tests.workers.rig import build_tiny
from vrl.algorithms.aggregation import Counts
from vrl.protocol.columns import INPUT_IDS, LOSS_MASK
from vrl.protocol.dataproto import DataProto
from vrl.protocol.ragged import Ragged
from vrl.workers.learner import BatchLimits, Learner, LossOutput, OptimizerState, under_role
from vrl.workers.microbatch import Packer

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


class Slope:
    """A loss whose gradient is `self.slope` at every weight."""

    slope = 1.0

    def counts(self, rows: DataProto) -> Counts:
        return Counts(1, 1)

    def __call__(self, module: nn.Module, packed: object, rows: DataProto, totals: Counts) -> LossOutput:
        return LossOutput(sum(p.sum() * self.slope for p in module.parameters()))

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float], totals: Counts) -> dict[str, float]:
        return {}


@pytest.mark.dist
@pytest.mark.usefixtures("one_rank")
def test_a_skipped_step_leaves_weights_and_optimizer_alone_and_is_counted() -> None:
    module, loss = nn.Linear(3, 2), Slope()
    stepper = OptimizerState(
        optimizer=torch.optim.AdamW(module.parameters(), lr=0.1), schedule=lambda _: 1.0, grad_clip=1.0
    )
    learner = Learner(module, Packer(None, needs_positions=False), BatchLimits(), stepper)
    ids = Ragged.from_rows([[1, 2]], torch.int64)
    row = DataProto({INPUT_IDS: ids, LOSS_MASK: Ragged(torch.tensor([False, True]), ids.offsets)})

    def state() -> list[torch.Tensor]:
        entries = [value for entry in stepper.optimizer.state.values() for value in entry.values()]
        return deepcopy([*(p.detach() for p in module.parameters()), *entries])

    def equal(before: list[torch.Tensor]) -> bool:
        return all(torch.equal(one, other) for one, other in zip(before, state(), strict=True))

    learner.update(row, [[0]], loss)
    before = state()
    assert len(before) == 2 + 2 * 3  # of each parameter: step, exp_avg, exp_avg_sq
    for count, slope in enumerate((float("inf"), -float("inf"), float("nan")), 1):
        loss.slope = slope
        metrics = under_role(learner.update(row, [[0]], loss), "critic")
        assert equal(before)
        assert (metrics["critic/skipped_steps"], metrics["critic/skipped_in_a_row"]) == (count, count)
    loss.slope = 1.0
    metrics = learner.update(row, [[0]], loss)
    assert not equal(before)
    assert (metrics["skipped_steps"], metrics["skipped_in_a_row"]) == (3, 0)


@pytest.mark.dist
def test_the_page_in_the_docs_has_all_ways_within_the_bound(everything: dict[str, Measured]) -> None:
    if os.environ.get("VRL_WRITE_TABLES"):
        PAGE.write_text(table(everything))
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if re.match(r"\| .*e[-+]\d\d", line)]
    ways = [*WAYS, *GROUPS, *ADAPTERS]
    names = [way.name for measured in everything.values() for way in ways if way.name in measured]
    assert [row[0].strip() for row in rows] == names
    assert all(figure.strip() == "-" or float(figure) < BOUND for row in rows for figure in row[1:])
