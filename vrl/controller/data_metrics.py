"""What a step's rows say, in verl's metric names. Pure functions from a batch to numbers; the trainer calls them.

Rows are those that are trained on: failed episodes have left the batch before, `failure_metrics` counts them. Means
are taken in float64. A number that has nothing to be taken over (no sampled token, no row) is left out.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import psutil
import torch
from torch import Tensor

from vrl.algorithms.metrics import equal_group_share, explained_variance
from vrl.controller.score_parts import part_metrics
from vrl.controller.turn_metrics import turn_metrics
from vrl.protocol.balance import unit_sums
from vrl.protocol.columns import (
    ADVANTAGES,
    GREEDY_SAMPLE,
    INPUT_IDS,
    LOSS_MASK,
    OLD_LOG_PROBS,
    PROMPT_LENGTH,
    RETRIES,
    RETURNS,
    REWARD_BASELINES,
    RM_CUT_TOKENS,
    RM_SCORES,
    ROLLOUT_LOG_PROBS,
    RULE_SCORES,
    SAMPLE_INDEX,
    SCORE_EXTRA,
    STOP_REASON,
    TOKEN_LEVEL_REWARDS,
    TOKEN_LEVEL_SCORES,
    TURN_IDS,
    VALUES,
)
from vrl.protocol.dataproto import DataProto
from vrl.protocol.dispatch import row_shares
from vrl.protocol.rows import group_numbers, group_prompts
from vrl.protocol.trajectory import StopReason

_SECONDS = "timing_s/"
_STAGES_OVER_ALL_TOKENS = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
_ROW_SUMS = {TOKEN_LEVEL_SCORES: "critic/score", TOKEN_LEVEL_REWARDS: "critic/rewards"}
_OF_ROWS = {
    REWARD_BASELINES: "critic/reward_baselines",
    RM_SCORES: "reward_model/score",
    RULE_SCORES: "reward_model/rule_score",
}
_ROWS_ABOVE_ZERO = {RM_CUT_TOKENS: "reward_model/truncated_rows", RETRIES: "training/retried_rows"}
_SAMPLED = {ADVANTAGES: "critic/advantages", RETURNS: "critic/returns", VALUES: "critic/values"}


def data_metrics(batch: DataProto) -> dict[str, float]:
    """Return scores and their parts, rewards, advantages, lengths, turns, stop reasons and mismatch of a step's rows.

    Columns that the batch lacks have no metrics, nor have environments that no row had. `response_length` counts all
    tokens after the prompt, observations included; `num_turns` counts the model's turns; `training/retried_rows` are
    rows whose episode had failed outside the model before, and was run again.
    """
    out = {"training/num_rows": float(len(batch))}
    if not len(batch):
        return out
    mask = batch.ragged(LOSS_MASK).values
    for column, name in _ROW_SUMS.items():
        if column in batch:
            out |= _spread(name, row_sums(batch, column))
    for column, name in _OF_ROWS.items():
        if column in batch:
            out |= _spread(name, batch.dense(column))
    counted = [column for column in _ROWS_ABOVE_ZERO if column in batch]
    out |= {_ROWS_ABOVE_ZERO[column]: float((batch.dense(column) > 0).sum()) for column in counted}
    for column, name in _SAMPLED.items():
        if column in batch:
            out |= _spread(name, batch.ragged(column).values[mask])
    if VALUES in batch and RETURNS in batch:
        values, returns = batch.ragged(VALUES).values, batch.ragged(RETURNS).values
        out["critic/vf_explained_var"] = explained_variance(values, returns, mask)
    out |= part_metrics(batch) | turn_metrics(batch)
    return out | _length_metrics(batch) | _group_metrics(batch) | _mismatch_metrics(batch)


def row_sums(batch: DataProto, column: str) -> Tensor:
    """Return float64 `[B]`: the sum of a per-token column over each row."""
    ragged = batch.ragged(column)
    return torch.segment_reduce(ragged.values.double(), "sum", offsets=ragged.offsets)


def failure_metrics(failed: DataProto) -> dict[str, float]:
    """Return how many episodes failed outside the model, in all and by the kind that their failure text begins with.

    Greedy episodes that were to give a baseline count as well; `training/failed_baselines` says how many they are.
    """
    out = {"training/failed_rows": float(len(failed))}
    if len(failed):
        greedy = int((failed.dense(SAMPLE_INDEX) == GREEDY_SAMPLE).sum())
        out |= {"training/failed_baselines": float(greedy)} if greedy else {}
        texts = [str(extra.get("failure", "unknown")) for extra in failed.objects[SCORE_EXTRA]]
        kinds = Counter("_".join(text.partition(":")[0].split()[:4]) for text in texts)
        out |= {f"training/failed_rows/{kind}": float(count) for kind, count in sorted(kinds.items())}
    return out


def performance_metrics(seconds: Mapping[str, float], batch: DataProto, ranks: int) -> dict[str, float]:
    """Return `perf/*` and `timing_per_token_ms/*` of a step.

    Args:
        seconds: by stage, under the names `timing_s/*`; `timing_s/step` is the whole step.
        batch: the step's rows.
        ranks: processes of the run; `perf/throughput` is tokens a second and rank.
    """
    tokens = int(batch.ragged(INPUT_IDS).offsets[-1]) if len(batch) else 0
    out = {"perf/total_num_tokens": float(tokens)}
    step = seconds.get(f"{_SECONDS}step", 0.0)
    if step > 0.0:
        out |= {"perf/time_per_step": step, "perf/throughput": tokens / step / ranks}
    response = tokens - int(batch.dense(PROMPT_LENGTH).sum()) if len(batch) else 0
    divisors = {"gen": response, **dict.fromkeys(_STAGES_OVER_ALL_TOKENS, tokens)}
    for stage, count in divisors.items():
        if count and f"{_SECONDS}{stage}" in seconds:
            out[f"timing_per_token_ms/{stage}"] = 1000.0 * seconds[f"{_SECONDS}{stage}"] / count
    return out


def balance_metrics(batch: DataProto, ranks: int, *, share_prompts: bool = False) -> dict[str, float]:
    """Return `global_seqlen/*`: tokens a rank when rows are cut in the order they come, and as they are balanced.

    `ranks` are those that hold different rows: ranks that share sequences are one.
    With `share_prompts` the latter are the tokens that are computed, each prompt of a rank once.
    """
    prompts = group_prompts(batch) if share_prompts else None
    lengths: list[int] = batch.ragged(INPUT_IDS).lengths.tolist()
    plain = [int(part.ragged(INPUT_IDS).offsets[-1]) for part in batch.chunk(ranks)]
    balanced = unit_sums(row_shares(lengths, ranks, prompts), lengths, prompts)
    return {
        "global_seqlen/min": float(min(plain)),
        "global_seqlen/max": float(max(plain)),
        "global_seqlen/minmax_diff": float(max(plain) - min(plain)),
        "global_seqlen/balanced_min": float(min(balanced)),
        "global_seqlen/balanced_max": float(max(balanced)),
        "global_seqlen/mean": sum(lengths) / ranks,
    }


def own_processes() -> list[int]:
    """Return this process and all that it started on this machine: Ray, workers, reward processes."""
    me = psutil.Process()
    return [me.pid, *(child.pid for child in me.children(recursive=True))]


def memory_used_gb(pids: Iterable[int]) -> float:
    """Return the memory of processes of this machine in GiB: what each has for itself, and what they share once.

    An estimate of their proportional memory at a fraction of its cost. Processes that have ended count nothing.
    """
    own, shared = 0, 0
    for pid in pids:
        try:
            memory = psutil.Process(pid).memory_info()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        own += memory.rss - memory.shared
        shared = max(shared, memory.shared)
    return (own + shared) / 2**30


def _spread(name: str, values: Tensor) -> dict[str, float]:
    if not values.numel():
        return {}
    return {
        f"{name}/mean": float(values.double().mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _length_metrics(batch: DataProto) -> dict[str, float]:
    prompt = batch.dense(PROMPT_LENGTH)
    response = batch.ragged(INPUT_IDS).lengths - prompt
    turns = torch.tensor([int(row.max()) + 1 if len(row) else 0 for row in batch.ragged(TURN_IDS).to_rows()])
    counts = Counter(batch.objects[STOP_REASON])
    reasons = [reason for reason in StopReason if reason is not StopReason.FAILED]
    return {
        **_spread("response_length", response),
        "response_length/clip_ratio": counts[StopReason.LENGTH] / len(batch),
        **_spread("prompt_length", prompt),
        **_spread("num_turns", turns),
        **{f"stop_reason/{reason}": counts[reason] / len(batch) for reason in reasons},
    }


def _group_metrics(batch: DataProto) -> dict[str, float]:
    share = equal_group_share(row_sums(batch, TOKEN_LEVEL_SCORES), group_numbers(batch))
    return {"training/groups_without_variance": share}


def _mismatch_metrics(batch: DataProto) -> dict[str, float]:
    """|p_trainer - p_engine| of sampled tokens; the update itself reports it where no old log-probs are computed."""
    mask = batch.ragged(LOSS_MASK).values
    if OLD_LOG_PROBS not in batch or not bool(mask.any()):
        return {}
    trainer, engine = (batch.ragged(name).values[mask].double().exp() for name in (OLD_LOG_PROBS, ROLLOUT_LOG_PROBS))
    gap = (trainer - engine).abs()
    return {
        "training/rollout_probs_diff_mean": float(gap.mean()),
        "training/rollout_probs_diff_max": float(gap.max()),
        "training/rollout_probs_diff_std": float(gap.std()) if len(gap) > 1 else 0.0,
    }
