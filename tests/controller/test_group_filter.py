"""Which groups are trained on, how often prompts are drawn for them, and where the loader stands afterwards."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from vrl.controller.credit import OverlongPenalty
from vrl.controller.group_filter import (
    AllGroups,
    DifferingGroups,
    GroupBounds,
    ZeroVarianceFilter,
    all_rows,
    group_filter,
    row_metric,
)
from vrl.controller.roles import Generated
from vrl.controller.trainer import MiniBatches
from vrl.data.dataset import load_rows
from vrl.data.loader import PromptLoader, ordered_batches
from vrl.protocol.columns import INPUT_IDS, MINI_BATCH, REWARD_BASELINES, SAMPLE_INDEX, UID
from vrl.protocol.config.builder import build
from vrl.protocol.dataproto import DataProto, Meta
from vrl.protocol.dispatch import mini_batch_shares, row_shares
from vrl.protocol.errors import RewardError
from vrl.protocol.rows import batch_of
from vrl.protocol.trajectory import Prompt, Sampling, StopReason, Trajectory

Make = Callable[..., Trajectory]
N = 3  # samples a prompt


class Sampler:
    """What a rollout gives: `scores` by row id, one for each sample; None is an episode that failed."""

    def __init__(self, make: Make, scores: Mapping[str, Sequence[float | None]]) -> None:
        self._make, self._scores = make, scores
        self.drawn: list[list[str]] = []

    def __call__(self, prompts: Sequence[Prompt], _sampling: Sampling, _step: int) -> Generated:
        self.drawn.append([prompt.row_id for prompt in prompts])
        rows = [
            self._make(prompt.uid, sample_index=i, score=score or 0.0, failure=None if score is not None else "oh: no")
            for prompt in prompts
            for i, score in enumerate(self._scores[prompt.row_id])
        ]
        batch = batch_of(rows, None, Meta(policy_version=4))
        failed = torch.tensor([row.stop_reason is StopReason.FAILED for row in rows], dtype=torch.bool)
        return Generated(batch.rows(~failed), batch.rows(failed), 4, {"timing_s/reward": 0.5})


def prompts_of(*names: str) -> list[Prompt]:
    return [Prompt(row_id=name, uid=f"draw-{name}", messages=()) for name in names]


def run(
    sampler: Sampler, draws: Sequence[Sequence[Prompt]], bounds: GroupBounds, metric: str | None = None
) -> tuple[Generated, Sequence[Prompt]]:
    left = iter(draws[1:])
    groups = DifferingGroups(sampler, Sampling(n=N), lambda: next(left), row_metric(metric, ()), bounds)
    return groups.complete(sampler(draws[0], Sampling(n=N), 7), draws[0], 7)


SCORES = {
    "differs": (1.0, 0.0, 0.0),
    "right": (1.0, 1.0, 1.0),
    "awkward": (0.7, 0.7, 0.7),
    "other": (0.0, 0.0, 1.0),
    "partly": (1.0, None, 0.0),
    "alone": (None, 1.0, None),
    "dead": (None, None, None),
    "third": (0.5, 1.0, 0.5),
}


def test_equal_groups_are_dropped_and_prompts_are_drawn_until_the_step_is_full(trajectory: Make):
    sampler = Sampler(trajectory, SCORES)
    draws = [prompts_of("right", "differs", "alone"), prompts_of("awkward", "partly", "right"),
             prompts_of("other", "third")]  # fmt: skip
    draws[1][2] = Prompt(row_id="right", uid="draw-right-again", messages=())
    bounds = GroupBounds(wanted=3, at_least=1, draws=9)
    found, prompts = run(sampler, draws, bounds)
    assert list(dict.fromkeys(found.rows.objects[UID])) == ["draw-differs", "draw-partly", "draw-other"]
    assert found.rows.dense(SAMPLE_INDEX).tolist() == [0, 1, 2, 0, 2, 0, 1, 2]  # the rest of a group stays one
    assert [prompt.uid for prompt in prompts] == [prompt.uid for draw in draws for prompt in draw]
    assert len(found.failed) == 3
    assert sorted(set(found.dropped.objects[UID])) == [
        "draw-alone", "draw-awkward", "draw-right", "draw-right-again", "draw-third",
    ]  # fmt: skip
    assert (found.policy_version, found.timing) == (4, {"timing_s/reward": 1.5})
    assert {name.rpartition("/")[2]: value for name, value in found.metrics.items() if "metric" not in name} == {
        "num_gen_batches": 3, "groups_generated": 8, "groups_kept": 3, "groups_dropped_equal": 4,
        "groups_dropped_surplus": 1, "rows_dropped": 13,
    }  # fmt: skip
    scores = [score for name in SCORES if name != "dead" for score in SCORES[name] if score is not None]
    scores += SCORES["right"]  # drawn twice
    mean = sum(score for score in scores if score is not None) / len(scores)
    assert found.metrics["training/filter_metric_of_all_rows/mean"] == pytest.approx(mean, rel=1e-6)
    assert len(all_rows(found).rows) == len(scores)
    baselines = found.rows.with_columns(**{REWARD_BASELINES: torch.zeros(8)})  # added later, to what is kept
    assert len(all_rows(Generated(baselines, found.failed, 4, {}, found.dropped)).rows) == len(scores)


def test_enough_groups_need_no_second_draw(trajectory: Make):
    sampler = Sampler(trajectory, SCORES)
    found, _ = run(sampler, [prompts_of("other", "differs")], GroupBounds(wanted=2, at_least=2, draws=9))
    assert len(found.rows) == 6
    assert len(found.dropped) == 0
    assert all_rows(found) is found
    assert found.metrics["train/num_gen_batches"] == 1


@pytest.mark.parametrize(("at_least", "kept"), [(1, 1), (2, 0)])
def test_a_step_that_is_not_filled_goes_on_smaller_or_trains_on_nothing(
    trajectory: Make, at_least: int, kept: int, caplog: pytest.LogCaptureFixture
):
    sampler = Sampler(trajectory, SCORES)
    draws = [prompts_of("right", "differs"), prompts_of("awkward"), prompts_of("other")]
    with caplog.at_level(logging.WARNING):
        found, _ = run(sampler, draws, GroupBounds(wanted=4, at_least=at_least, draws=2))
    assert len(sampler.drawn) == 2  # the bound: the third draw is not asked for
    assert len(found.rows) == kept * N
    assert found.metrics["training/groups_kept"] == kept
    (record,) = caplog.records
    assert "after 2 draws" in record.getMessage()
    assert "1 groups of 4" in record.getMessage()
    assert ("trains on nothing" in record.getMessage()) == (kept == 0)


def test_a_draw_without_a_usable_row_ends_the_drawing(trajectory: Make):
    sampler = Sampler(trajectory, SCORES)
    found, _ = run(sampler, [prompts_of("dead")] * 5, GroupBounds(wanted=1, at_least=1, draws=5))
    assert len(sampler.drawn) == 1
    assert (len(found.rows), len(found.failed), len(found.dropped)) == (0, 3, 0)


def test_without_drawing_more_equal_groups_are_left_out_and_counted(trajectory: Make):
    sampler = Sampler(trajectory, SCORES)
    drawn = prompts_of("right", "differs", "alone", "dead", "partly", "awkward")
    found, prompts = ZeroVarianceFilter(row_metric(None, ())).complete(sampler(drawn, Sampling(n=N), 7), drawn, 7)
    assert len(sampler.drawn) == 1
    assert prompts == drawn
    assert list(found.rows.objects[UID]) == ["draw-differs"] * 3 + ["draw-partly"] * 2
    assert list(found.dropped.objects[UID]) == ["draw-right"] * 3 + ["draw-alone"] + ["draw-awkward"] * 3
    assert len(found.failed) == 6
    assert (found.policy_version, found.timing) == (4, {"timing_s/reward": 0.5})
    assert {name.removeprefix("training/"): found.metrics[name] for name in found.metrics if "metric" not in name} == {
        "train/num_gen_batches": 1, "groups_generated": 5, "groups_kept": 2, "groups_dropped_equal": 3,
        "groups_dropped_surplus": 0, "rows_dropped": 7,
    }  # fmt: skip
    mean = (3.0 + 1.0 + 1.0 + 1.0 + 3 * 0.7) / 12
    assert found.metrics["training/filter_metric_of_all_rows/mean"] == pytest.approx(mean, rel=1e-6)
    assert len(all_rows(found).rows) == 12


@pytest.mark.parametrize(("names", "said"), [(("right", "alone"), 1), (("dead",), 0)])
def test_where_no_group_differs_the_step_trains_on_nothing(
    trajectory: Make, names: tuple[str, ...], said: int, caplog: pytest.LogCaptureFixture
):
    drawn = prompts_of(*names)
    generated = Sampler(trajectory, SCORES)(drawn, Sampling(n=N), 7)
    with caplog.at_level(logging.WARNING):
        found, _ = ZeroVarianceFilter(row_metric(None, ())).complete(generated, drawn, 7)
    assert len(found.rows) == 0
    assert len(found.dropped) == len(generated.rows)
    assert found.metrics["training/groups_kept"] == 0
    assert [record.getMessage() for record in caplog.records] == [
        "step 7: no group differs in its reward; the step trains on nothing"
    ] * said


def test_fewer_rows_than_ranks_are_cut_into_mini_batches_on_all_of_them(trajectory: Make):
    drawn = prompts_of("right", "partly", "awkward")
    found, _ = ZeroVarianceFilter(row_metric(None, ())).complete(
        Sampler(trajectory, SCORES)(drawn, Sampling(n=N), 7), drawn, 7
    )
    batch = MiniBatches(prompts=2, epochs=2, shuffle=False).assign(found.rows, seed=1)
    lengths = batch.ragged(INPUT_IDS).lengths.tolist()
    shares = mini_batch_shares(batch.dense(MINI_BATCH), lengths, ranks=4)
    assert [len(share.steps) for share in shares] == [2] * 4  # each rank takes part in both optimizer steps
    assert sorted(len(share.rows) for share in shares) == [0, 0, 1, 1]
    assert sorted(map(len, row_shares(lengths, 4))) == [0, 0, 1, 1]


def test_metrics_have_verls_names(trajectory: Make):
    rows = batch_of(
        [
            trajectory("u", turns=(4,), score=1.0, score_extra={"acc": True, "format": 0.5}),
            trajectory("u", turns=(8,), score=1.0, score_extra={"acc": 10**400, "format": 0.25}),
        ],
        None,
        Meta(),
    )
    penalty = OverlongPenalty(max_length=8, buffer=4, factor=0.5)
    for name, wanted in (
        (None, [1.0, 1.0]), ("score", [1.0, 1.0]), ("seq_reward", [1.0, 0.5]), ("seq_final_reward", [1.0, 0.5]),
        ("acc", [1.0, 1.0]), ("format", [0.5, 0.25]),
    ):  # fmt: skip
        assert row_metric(name, [penalty])(rows).tolist() == wanted, name
    with pytest.raises(RewardError, match=r"each name in algorithm\.filter_groups\.metric"):
        row_metric("style", ())(rows)


def test_off_is_another_object_and_on_takes_sizes_from_the_settings():
    def nothing(*_: Any) -> Any:
        raise AssertionError("nothing is generated when a trainer is built")

    settings: dict[str, Any] = {
        "data": {"train_batch_size": 16, "gen_batch_size": 24},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8}},
    }
    assert isinstance(group_filter(build(settings), nothing, Sampling(), nothing), AllGroups)
    assert build(settings).prompts_per_draw == 16
    settings["algorithm"] = {"filter_groups": {"enable": True}}
    config = build(settings)
    assert isinstance(group_filter(config, nothing, Sampling(), nothing), DifferingGroups)
    assert (config.prompts_per_draw, config.algorithm.filter_groups.draws) == (24, 10)
    settings["algorithm"] = {"zero_variance_filter": True}
    assert isinstance(group_filter(build(settings), nothing, Sampling(), nothing), ZeroVarianceFilter)
    assert build(settings).prompts_per_draw == 16


def test_without_variance_is_what_has_none_after_shaping(trajectory: Make):
    settings = {"overlong_buffer": {"enable": True, "len": 4, "penalty_factor": 0.5}, "max_resp_len": 8}
    config = build({"algorithm": {"zero_variance_filter": True}, "reward_model": settings})
    rows = [trajectory("short", turns=(2,), score=1.0) for _ in range(2)]
    rows += [trajectory("long", turns=(length,), score=1.0) for length in (2, 8)]
    generated = Generated(batch_of(rows, None, Meta()), DataProto(), 0, {})
    found, _ = group_filter(config, Sampler(trajectory, {}), Sampling(), list).complete(generated, [], 1)
    assert list(found.rows.objects[UID]) == ["long", "long"]


def test_a_resumed_loader_draws_the_prompts_that_come_next(trajectory: Make, tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "\n".join(json.dumps({"prompt": [{"role": "user", "content": str(i)}], "data_source": "x"}) for i in range(20))
    )

    rows = load_rows([str(file)])
    scores = {
        row.row_id: (1.0, 0.0, i % 2) if i % 3 else (1.0, 1.0, 1.0) for i, row in enumerate(next(ordered_batches(rows)))
    }

    def step(loader: PromptLoader) -> list[str]:
        sampler, prompts = Sampler(trajectory, scores), loader.next_batch()
        bounds = GroupBounds(wanted=3, at_least=1, draws=4)
        groups = DifferingGroups(sampler, Sampling(n=N), loader.next_batch, row_metric(None, ()), bounds)
        return list(groups.complete(sampler(prompts, Sampling(n=N), 1), prompts, 1)[0].rows.objects[UID])

    first, second = PromptLoader(rows, 3, seed=5), PromptLoader(rows, 3, seed=5)
    step(first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    wanted = [step(first) for _ in range(4)]  # over the end of the epoch
    assert [step(second) for _ in range(4)] == wanted
    assert first.state_dict() == second.state_dict()
    assert first.epoch > 0
