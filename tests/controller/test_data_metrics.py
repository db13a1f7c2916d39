"""Metrics of a step's rows: verl's names, and numbers that can be checked by hand."""

import math
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from vrl.controller.data_metrics import (
    balance_metrics,
    data_metrics,
    failure_metrics,
    memory_used_gb,
    performance_metrics,
)
from vrl.protocol.columns import (
    ADVANTAGES,
    INPUT_IDS,
    LOSS_MASK,
    OLD_LOG_PROBS,
    PROMPT_LENGTH,
    RETURNS,
    ROLLOUT_LOG_PROBS,
    TOKEN_LEVEL_REWARDS,
    TOKEN_LEVEL_SCORES,
    VALUES,
)
from vrl.protocol.dataproto import DataProto, Meta
from vrl.protocol.ragged import Ragged
from vrl.protocol.rows import batch_of
from vrl.protocol.trajectory import StopReason, Trajectory

Make = Callable[..., Trajectory]


@pytest.fixture
def batch(trajectory: Make) -> DataProto:
    """Two prompts of two samples: one pair with equal scores, one without; lengths 5, 6, 5 and 8."""
    rows = [
        trajectory("u0", score=1.0),
        trajectory("u0", turns=(3,), score=1.0, stop_reason=StopReason.LENGTH),
        trajectory("u1", score=0.0),
        trajectory("u1", turns=(2, 2), score=1.0, stop_reason=StopReason.MAX_TURNS),
    ]
    return batch_of(rows, None, Meta())


def per_token(batch: DataProto, value: float, elsewhere: float) -> Ragged:
    """A per-token column that is `value` on sampled tokens and something else on the others."""
    mask = batch.ragged(LOSS_MASK)
    return Ragged(torch.where(mask.values, value, elsewhere), mask.offsets)


def test_scores_and_rewards_are_sums_over_rows(batch: DataProto):
    scores = batch.ragged(TOKEN_LEVEL_SCORES)
    penalised = Ragged(scores.values - 0.1 * batch.ragged(LOSS_MASK).values, scores.offsets)
    metrics = data_metrics(batch.with_columns(**{TOKEN_LEVEL_REWARDS: penalised}))
    assert metrics["critic/score/mean"] == 0.75
    assert (metrics["critic/score/max"], metrics["critic/score/min"]) == (1.0, 0.0)
    assert metrics["critic/rewards/mean"] == pytest.approx(0.75 - 0.1 * 11 / 4)
    assert metrics["critic/rewards/min"] == pytest.approx(-0.2)


def test_advantages_and_returns_are_taken_over_sampled_tokens_only(batch: DataProto):
    columns = {ADVANTAGES: per_token(batch, 2.0, 99.0), RETURNS: per_token(batch, -1.0, 99.0)}
    metrics = data_metrics(batch.with_columns(**columns))
    assert [metrics[f"critic/advantages/{name}"] for name in ("mean", "max", "min")] == [2.0, 2.0, 2.0]
    assert [metrics[f"critic/returns/{name}"] for name in ("mean", "max", "min")] == [-1.0, -1.0, -1.0]
    assert not any(name.startswith(("critic/values", "critic/vf")) for name in metrics)


def test_environments_report_shares_and_times(trajectory: Make):
    def info(seconds: float, **reported: object) -> dict[str, object]:
        return {**reported, "tool_seconds": seconds, "queue_seconds": 0.0}

    rows = [
        trajectory(
            "u0",
            turns=(2, 2),
            turn_rewards=(0.5, 0.0),
            turn_info=(info(1.0, malformed=True, note="x", digits=10**400), info(3.0)),
        ),
        trajectory("u1", turns=(2,), turn_rewards=(0.1,), turn_info=(info(0.5, malformed=False),)),
        trajectory("u2"),
    ]
    metrics = data_metrics(batch_of(rows, None, Meta()))
    assert metrics["env/malformed"] == 0.5
    assert (metrics["tool/seconds/mean"], metrics["tool/seconds/max"]) == (1.5, 3.0)
    assert metrics["turn_reward/mean"] == pytest.approx(0.2)
    assert metrics["num_turns/max"] == 2.0
    assert not {"env/note", "env/digits"} & set(metrics)
    assert not any(
        name.startswith(("env/", "tool/", "turn_reward/")) for name in data_metrics(batch_of(rows[2:], None, Meta()))
    )


def test_each_part_of_the_score_has_a_mean(trajectory: Make):
    extras = ({"format": True, "acc": 0.5, "pred": "x"}, {"format": False, "acc": 10**400}, {"format": 0.5})
    metrics = data_metrics(batch_of([trajectory(score_extra=extra) for extra in extras], None, Meta()))
    found = {name: value for name, value in metrics.items() if name.startswith("reward/")}
    assert found == {"reward/acc/mean": 0.5, "reward/format/mean": 0.5}


def test_values_bring_the_explained_variance(batch: DataProto):
    mask = batch.ragged(LOSS_MASK)
    returns = Ragged(torch.arange(len(mask.values), dtype=torch.float32), mask.offsets)
    off = Ragged(returns.values + 0.5, mask.offsets)
    metrics = data_metrics(batch.with_columns(**{RETURNS: returns, VALUES: off}))
    assert metrics["critic/vf_explained_var"] == pytest.approx(1.0)
    assert metrics["critic/values/mean"] - metrics["critic/returns/mean"] == pytest.approx(0.5)


def test_lengths_count_everything_behind_the_prompt(batch: DataProto):
    metrics = data_metrics(batch)
    assert metrics["response_length/mean"] == (2 + 3 + 2 + 5) / 4
    assert (metrics["response_length/max"], metrics["response_length/min"]) == (5, 2)
    assert metrics["response_length/clip_ratio"] == 0.25
    assert metrics["prompt_length/mean"] == 3
    assert (metrics["num_turns/mean"], metrics["num_turns/max"]) == (1.25, 2)


def test_stop_reasons_have_shares_also_of_zero(batch: DataProto):
    metrics = data_metrics(batch)
    shares = {name.partition("/")[2]: value for name, value in metrics.items() if name.startswith("stop_reason/")}
    assert shares == {
        "answer": 0.5,
        "length": 0.25,
        "max_turns": 0.25,
        "context_full": 0.0,
        "time_limit": 0.0,
        "env_done": 0.0,
        "image_limit": 0.0,
    }


def test_groups_without_variance(batch: DataProto):
    metrics = data_metrics(batch)
    assert metrics["training/groups_without_variance"] == 0.5
    assert metrics["training/num_rows"] == 4


def test_mismatch_needs_old_log_probs_and_ignores_other_tokens(batch: DataProto):
    assert not any("probs_diff" in name for name in data_metrics(batch))
    old = per_token(batch, math.log(0.5), 7.0)
    old.values[3] = math.log(0.75)  # the first sampled token of the first row
    metrics = data_metrics(batch.with_columns(**{OLD_LOG_PROBS: old}))
    gaps = torch.tensor([0.25] + [0.0] * 10, dtype=torch.float64)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.25, abs=1e-7)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(float(gaps.mean()), abs=1e-7)
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(float(gaps.std()), abs=1e-7)


def test_no_rows_and_no_sampled_tokens_break_nothing(batch: DataProto):
    assert data_metrics(batch[:0]) == {"training/num_rows": 0.0}
    columns = {LOSS_MASK: per_token(batch, 0, 0).values.bool(), ROLLOUT_LOG_PROBS: per_token(batch, 0.0, 0.0).values}
    offsets = batch.ragged(INPUT_IDS).offsets
    silent = batch.with_columns(**{name: Ragged(values, offsets) for name, values in columns.items()})
    metrics = data_metrics(silent.with_columns(**{ADVANTAGES: per_token(silent, 0.0, 0.0)}))
    assert "critic/advantages/mean" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())


def test_failures_are_counted_by_kind(trajectory: Make):
    failures = ("reward raised: Traceback", "reward raised: Other", "reward timed out: 10 s")
    failed = batch_of([trajectory(failure=text) for text in failures], None, Meta())
    assert failure_metrics(failed) == {
        "training/failed_rows": 3,
        "training/failed_rows/reward_raised": 2,
        "training/failed_rows/reward_timed_out": 1,
    }
    assert failure_metrics(failed[:0]) == {"training/failed_rows": 0}


def test_performance(batch: DataProto):
    seconds = {"timing_s/step": 4.0, "timing_s/gen": 1.2, "timing_s/update_actor": 2.4, "timing_s/testing": 9.0}
    assert performance_metrics(seconds, batch, ranks=2) == {
        "perf/total_num_tokens": 24,
        "perf/time_per_step": 4.0,
        "perf/throughput": 3.0,
        "timing_per_token_ms/gen": pytest.approx(100.0),
        "timing_per_token_ms/update_actor": pytest.approx(100.0),
    }
    assert performance_metrics({}, batch[:0], ranks=2) == {"perf/total_num_tokens": 0}


def test_balance(batch: DataProto):
    found = {name.partition("/")[2]: value for name, value in balance_metrics(batch, 2).items()}
    assert found == {"min": 11, "max": 13, "minmax_diff": 2, "balanced_min": 11, "balanced_max": 13, "mean": 12}
    assert balance_metrics(batch, 5)["global_seqlen/min"] == 0
    shared = balance_metrics(batch, 2, share_prompts=True)
    prompt = int(batch.dense(PROMPT_LENGTH)[0])
    assert (shared["global_seqlen/balanced_min"], shared["global_seqlen/balanced_max"]) == (11 - prompt, 13 - prompt)


def test_memory_of_processes():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        alone, both = memory_used_gb([os.getpid()]), memory_used_gb([os.getpid(), other.pid])
        other.communicate(b"\n")
    assert 0.01 < alone < both < alone + 0.1
    assert memory_used_gb([other.pid]) == 0.0
