"""One update of the learner is the same however its rows are cut: over ranks, micro-batches, budgets, shared rows."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.workers.invariance import (
    ADAPTERS,
    FEW,
    FIVE,
    GROUPS,
    MERGED,
    WAYS,
    WHOLE,
    Measured,
    Way,
    deviations,
    run_ways,
    table,
)
from tests.workers.learner_process import learner_of, objective_of, rows_of, weights
from tests.workers.rig import build_tiny, config_of, context_of
from vrl.algorithms.aggregation import Counts
from vrl.models.loading import load_policy
from vrl.protocol.columns import INPUT_IDS, LOSS_MASK, OLD_LOG_PROBS
from vrl.protocol.config.builder import fill
from vrl.protocol.config.model import OptimConfig
from vrl.protocol.dataproto import DataProto
from vrl.protocol.ragged import Ragged
from vrl.workers.building import BuildContext
from vrl.workers.learner import BatchLimits, Learner, Loss, LossOutput, OptimizerState, under_role
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
        ways = [way for way in (WHOLE, *WAYS, *GROUPS, FIVE, *FEW, MERGED, *ADAPTERS) if way.world == world]
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
@pytest.mark.parametrize("way", [*GROUPS, *FEW], ids=lambda way: way.name)
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
    ways = [*WAYS, *GROUPS, *FEW, *ADAPTERS]
    names = [way.name for measured in everything.values() for way in ways if way.name in measured]
    assert [row[0].strip() for row in rows] == names
    assert all(figure.strip() == "-" or float(figure) < BOUND for row in rows for figure in row[1:])


@pytest.fixture(params=KINDS)
def context(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path], one_rank: None) -> BuildContext:
    return context_of(config_of(tiny_folder(request.param)))


@pytest.fixture
def batch(context: BuildContext) -> DataProto:
    return rows_of(context, "qwen2" if context.images is None else "qwen2_5_vl")


@dataclass
class Followed:
    """A loss with the metrics of each mini-batch, which the learner merges."""

    loss: Loss
    mini_batches: list[dict[str, float]] = field(default_factory=list)

    def counts(self, rows: DataProto) -> Counts:
        return self.loss.counts(rows)

    def __call__(self, *micro_batch: Any) -> LossOutput:
        return self.loss(*micro_batch)

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float], totals: Counts) -> dict[str, float]:
        self.mini_batches.append(self.loss.metrics(sums, maxima, totals))
        return self.mini_batches[-1]


def log_probs(learner: Learner, context: BuildContext, batch: DataProto) -> Ragged:
    """Return the log-probs as the actor gives them before an update."""
    sampling = objective_of(context).sampling
    given = {"temperature": sampling.temperature, "banned_ids": sampling.banned_ids}

    def run(module: torch.nn.Module, packed: Any, rows: DataProto) -> list[torch.Tensor]:
        return [module(packed, **given, positions=rows.ragged(LOSS_MASK).values).log_probs]

    return learner.infer(batch, run)[0][0]


@pytest.mark.dist
def test_only_the_first_mini_batch_of_a_step_meets_the_policy_that_sampled(
    context: BuildContext, batch: DataProto
) -> None:
    learner = learner_of(context, load_policy, Way(name="90 tokens at a time", max_tokens=90))
    batch = batch.with_columns(**{OLD_LOG_PROBS: log_probs(learner, context, batch)})
    half = len(batch) // 2
    loss = Followed(objective_of(context))
    learner.update(batch, [range(half), range(half, len(batch))], loss)
    first, second = loss.mini_batches
    assert abs(first["actor/ppo_kl"]) < 1e-6
    assert first["actor/pg_clipfrac"] == first["actor/pg_clipfrac_lower"] == 0.0
    assert abs(second["actor/ppo_kl"]) > 1e-3


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_a_smaller_last_micro_batch_counts_by_its_own_tokens_and_rows(
    context: BuildContext, batch: DataProto, mode: str
) -> None:
    found, seven = [], batch.rows([i % len(batch) for i in range(7)])
    for rows, runs in ((7, 1), (3, 3)):
        learner = learner_of(context, load_policy, Way(name="rows at a time", rows=rows))
        calls: list[None] = []
        learner.module.register_forward_hook(lambda *_, calls=calls: calls.append(None))
        found.append(learner.update(seven, [range(7)], objective_of(context, mode)))
        assert len(calls) == runs
    whole, cut = found
    for name in ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "grad_norm"):
        assert cut[name] == pytest.approx(whole[name], rel=BOUND), name
    assert whole["grad_norm"] > 1e-3


@pytest.mark.dist
def test_bfloat16_log_probs_do_not_depend_on_the_micro_batches(context: BuildContext, batch: DataProto) -> None:
    def sampled(**way: Any) -> torch.Tensor:
        learner = learner_of(context, load_policy, Way(name="", **way))
        return log_probs(learner, context, batch).values[batch.ragged(LOSS_MASK).values]

    whole = sampled(dtype="bfloat16")
    assert (sampled() - whole).abs().mean() > 1e-3  # it was computed in bfloat16
    for cut in ({"rows": 1}, {"rows": 3}, {"max_tokens": 90}):
        assert (sampled(dtype="bfloat16", **cut) - whole).abs().mean() < 1e-3, cut


@pytest.mark.dist
@pytest.mark.parametrize("context", ["qwen2"], indirect=True)
def test_updates_too_small_for_bfloat16_are_kept_in_the_master_weights(context: BuildContext, batch: DataProto) -> None:
    lr, steps = 1e-6, 3
    config = fill(context.config, {"actor_rollout_ref": {"actor": {"optim": {"lr": lr}}}})
    context = BuildContext(config=config, device=context.device, renderer=context.renderer, images=context.images)
    learner = learner_of(context, load_policy, Way(name="bfloat16", dtype="bfloat16"))
    assert learner.stepper is not None
    gradients: list[torch.Tensor] = []
    learner.stepper.optimizer.register_step_pre_hook(lambda *_: gradients.append(gradient_of(learner)))
    before = weights(learner)
    learner.update(batch, [range(len(batch))] * steps, objective_of(context))
    after = weights(learner)
    large = before[before.abs() > 2e-3].bfloat16()
    assert torch.equal(large + lr, large)
    assert torch.equal(large - lr, large)
    wanted = adamw(before, gradients, config.actor_rollout_ref.actor.optim)
    assert (wanted - before.double()).abs().median() > lr
    torch.testing.assert_close(after.double(), wanted, rtol=2e-7 * steps, atol=1e-10)


def gradient_of(learner: Learner) -> torch.Tensor:
    gradients = (p.grad.full_tensor() for p in learner.module.parameters())
    return torch.cat([gradient.reshape(-1) for gradient in gradients]).double()


def adamw(weights: torch.Tensor, gradients: Sequence[torch.Tensor], optim: OptimConfig) -> torch.Tensor:
    """Return the weights after a step for each gradient, in float64."""
    (first, second), found = optim.betas, weights.double()
    mean, square = torch.zeros_like(found), torch.zeros_like(found)
    for step, gradient in enumerate(gradients, start=1):
        mean = first * mean + (1 - first) * gradient
        square = second * square + (1 - second) * gradient**2
        unbiased = (square / (1 - second**step)).sqrt() + 1e-8
        found = found * (1 - optim.lr * optim.weight_decay) - optim.lr * mean / (1 - first**step) / unbiased
    return found
