"""Correction for the gap between the engine that sampled and the policy that trains: weights, rejection, metrics.

The trainer calls `rollout_correction` once on a whole batch, before mini-batches are cut. With pi the trainer's
log-probs (old_log_probs), mu the engine's and x = log pi - log mu on the sampled tokens:

- `rollout_is` gives importance weights: token e^x, sequence e^(sum of x over the row). A number as threshold caps them
  (truncated importance sampling), "low_high" puts those outside to 0 (IcePop, arXiv 2510.18855). Then, if wanted, they
  are divided by their mean (over tokens, or over rows for sequence weights).
- `rollout_rs` takes tokens or rows out of the loss mask, by one or several statistics joined by commas: token_k,
  seq_sum_k, seq_mean_k with k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x, and seq_max_k2, seq_max_k3. For k2 and k3 the
  threshold is the largest value kept. For k1 it is "low_high" (a number u: 1/u to u) on e^k1. That is mu / pi, the
  inverse of the importance ratio, as in verl.

x is held within 20 wherever it is exponentiated. Weights are normalised before rejection, as in verl. Deviations from
verl: rows without a sampled token count in no metric, a batch without any is no error, and neither is one with all
weights outside the band.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from vrl.algorithms import segments

_MAX_LOG_RATIO = 20.0  # e^20 is beyond every threshold in use, and its square still fits float32
IMPORTANCE_LEVELS = ("token", "sequence")
REJECTION_STATISTICS = (
    *(f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean") for k in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
)


@final
@dataclass(frozen=True, slots=True)
class Bounds:
    """What a threshold allows: from `low` (None: no lower end) to `high`, both included."""

    low: float | None
    high: float

    def contain(self, x: Float[Tensor, " N"]) -> Bool[Tensor, " N"]:
        """True inside; false for NaN."""
        inside = x <= self.high
        return inside if self.low is None else inside & (x >= self.low)

    def log(self) -> "Bounds":
        """The same on logarithms."""
        return Bounds(None if self.low is None else math.log(self.low), math.log(self.high))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionParams:
    """`algorithm.rollout_correction` in verl's names and spellings; None turns a part off. Checked when made."""

    rollout_is: str | None = None
    rollout_is_threshold: float | str | None = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: float | str | None = None

    def __post_init__(self) -> None:
        if self.rollout_is is not None:
            if self.rollout_is not in IMPORTANCE_LEVELS:
                raise ValueError(
                    f"unknown rollout_correction.rollout_is {self.rollout_is!r}; known: {', '.join(IMPORTANCE_LEVELS)}"
                )
            self.weight_bounds()
        if self.rollout_rs is not None:
            self.rejections()

    def weight_bounds(self) -> Bounds:
        """Cap (no lower end) or band of the weights."""
        return _bounds("rollout_is_threshold", self.rollout_is_threshold)

    def rejections(self) -> tuple[tuple[str, Bounds], ...]:
        """Statistics with what they allow, k1 on logarithms. One threshold for several statistics holds for each."""
        names = [name.strip() for name in (self.rollout_rs or "").split(",")]
        for name in names:
            if name not in REJECTION_STATISTICS:
                known = ", ".join(REJECTION_STATISTICS)
                raise ValueError(f"unknown statistic {name!r} in rollout_correction.rollout_rs; known: {known}")
        texts = [text.strip() for text in str(self.rollout_rs_threshold).split(",")]
        if len(texts) not in (1, len(names)):
            raise ValueError(
                f"rollout_correction.rollout_rs has {len(names)} statistics and rollout_rs_threshold "
                f"{len(texts)} values ({self.rollout_rs_threshold}): give one for each, or one for all"
            )
        texts = texts * len(names) if len(texts) == 1 else texts
        return tuple((name, _rejection_bounds(name, text)) for name, text in zip(names, texts, strict=True))


def _bounds(key: str, given: float | str | None) -> Bounds:
    parts = str(given).split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    rising = 0 < len(numbers) <= 2 and all(math.isfinite(x) and x > 0 for x in numbers) and numbers == sorted(numbers)
    if not rising:
        raise ValueError(
            f"rollout_correction.{key} must be a positive number or two rising ones as low_high, got {given!r}; "
            "2.0 and 0.5_2.0 are examples"
        )
    return Bounds(numbers[0] if len(numbers) == 2 else None, numbers[-1])


def _rejection_bounds(name: str, text: str) -> Bounds:
    bounds = _bounds("rollout_rs_threshold", text)
    if not name.endswith("k1"):
        if bounds.low is not None:
            raise ValueError(
                f"rollout_correction.rollout_rs={name} takes one upper bound as rollout_rs_threshold, got {text!r}"
            )
        return bounds
    if bounds.low is None and bounds.high < 1:
        raise ValueError(
            f"rollout_correction.rollout_rs={name} allows ratios from 1/u to u, got u={text}: give u >= 1 or low_high"
        )
    return (bounds if bounds.low is not None else Bounds(1.0 / bounds.high, bounds.high)).log()


@final
@dataclass(frozen=True, slots=True)
class RolloutCorrection:
    """`weights` per token (0 where nothing was sampled; None without rollout_is), the loss `mask` after rejection, and
    metrics, to be logged as rollout_corr/NAME.
    """

    weights: Float[Tensor, " T"] | None
    mask: Bool[Tensor, " T"]
    metrics: dict[str, float]


@torch.no_grad()
def rollout_correction(
    old_log_probs: Float[Tensor, " T"],
    rollout_log_probs: Float[Tensor, " T"],
    mask: Bool[Tensor, " T"],
    offsets: Int64[Tensor, " B1"],
    params: RolloutCorrectionParams,
) -> RolloutCorrection:
    """Weights, mask and metrics of a batch, computed in float64; weights come back in float32 or the wider dtype given.

    Masked tokens are never read. A batch without a sampled token has weights 0 and no metrics. A NaN on a sampled token
    stays one in the weights, and is rejected by `rollout_rs`.
    """
    gap = _log_ratio(old_log_probs, rollout_log_probs, mask)
    metrics: dict[str, float] = {}
    weights, kept = None, mask
    if params.rollout_is is not None:
        exact, weight_metrics = _importance_weights(gap, mask, offsets, params)
        weights = exact.to(torch.promote_types(old_log_probs.dtype, torch.float32))
        metrics |= weight_metrics
    if params.rollout_rs is not None:
        kept, rejection_metrics = _rejection(gap, mask, offsets, params)
        metrics |= rejection_metrics
    if not bool(mask.any()):
        return RolloutCorrection(weights, kept, {})
    metrics |= mismatch_metrics(old_log_probs, rollout_log_probs, mask, offsets)
    return RolloutCorrection(weights, kept, metrics)


@torch.no_grad()
def importance_weights(
    old_log_probs: Float[Tensor, " T"],
    rollout_log_probs: Float[Tensor, " T"],
    mask: Bool[Tensor, " T"],
    offsets: Int64[Tensor, " B1"],
    params: RolloutCorrectionParams,
) -> Float[Tensor, " T"]:
    """The weights that `rollout_correction` gives under `params`, whose `rollout_is` is set; nothing else of it."""
    weights, _ = _importance_weights(_log_ratio(old_log_probs, rollout_log_probs, mask), mask, offsets, params)
    return weights.to(torch.promote_types(old_log_probs.dtype, torch.float32))


@torch.no_grad()
def mismatch_metrics(
    old_log_probs: Float[Tensor, " T"],
    rollout_log_probs: Float[Tensor, " T"],
    mask: Bool[Tensor, " T"],
    offsets: Int64[Tensor, " B1"],
) -> dict[str, float]:
    """How far the engine is from the trainer, in verl's names; empty without a sampled token.

    kl and k3_kl: KL(mu, pi) over tokens. training_ppl, rollout_ppl, their logarithms and log_ppl_diff (trainer minus
    engine; mean, mean of the absolute value, largest, smallest), ppl_ratio: over rows. chi2_token, chi2_seq: mean
    squared ratio minus 1 over tokens and rows.
    """
    rows = segments.row_counts(mask, offsets) > 0
    if not bool(rows.any()):
        return {}
    gap = _log_ratio(old_log_probs, rollout_log_probs, mask)
    training = -segments.row_mean(old_log_probs.double(), mask, offsets)[rows]
    rollout = -segments.row_mean(rollout_log_probs.double(), mask, offsets)[rows]
    difference = training - rollout
    tensors = {
        "kl": -gap[mask].mean(),
        "k3_kl": _estimate("k3", gap)[mask].mean(),
        "training_ppl": training.exp().mean(),
        "training_log_ppl": training.mean(),
        "rollout_ppl": rollout.exp().mean(),
        "rollout_log_ppl": rollout.mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": _ratio(gap)[mask].square().mean() - 1.0,
        "chi2_seq": _ratio(segments.row_sum(gap, offsets))[rows].square().mean() - 1.0,
    }
    return {name: float(value) for name, value in tensors.items()}


def _log_ratio(
    old_log_probs: Float[Tensor, " T"], rollout_log_probs: Float[Tensor, " T"], mask: Bool[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """x in float64, 0 on masked tokens."""
    return torch.where(mask, old_log_probs, 0.0).double() - torch.where(mask, rollout_log_probs, 0.0).double()


def _ratio(log_ratio: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _estimate(name: str, gap: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """k1, k2 or k3 of each token."""
    if name == "k1":
        return -gap
    if name == "k2":
        return 0.5 * gap.square()
    held = gap.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return held.exp() - 1.0 - held


def _row_max(x: Float[Tensor, " T"], mask: Bool[Tensor, " T"], offsets: Int64[Tensor, " B1"]) -> Float[Tensor, " B1-1"]:
    if offsets.numel() == 1:
        return x.new_zeros(0)
    return torch.segment_reduce(torch.where(mask, x, -torch.inf), "max", offsets=offsets)


def _row_total(
    x: Float[Tensor, " T"], mask: Bool[Tensor, " T"], offsets: Int64[Tensor, " B1"]
) -> Float[Tensor, " B1-1"]:
    return segments.row_sum(torch.where(mask, x, 0.0), offsets)


_REDUCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "seq_sum": _row_total,
    "seq_mean": segments.row_mean,
    "seq_max": _row_max,
}


def _importance_weights(
    gap: Float[Tensor, " T"], mask: Bool[Tensor, " T"], offsets: Int64[Tensor, " B1"], params: RolloutCorrectionParams
) -> tuple[Float[Tensor, " T"], dict[str, float]]:
    bounds = params.weight_bounds()
    rows = segments.row_counts(mask, offsets) > 0
    by_row = segments.row_sum(gap, offsets)
    whole_rows = params.rollout_is == "sequence"
    log_ratio = segments.spread(by_row, offsets, gap.numel()) if whole_rows else gap
    raw = torch.where(mask, _ratio(log_ratio), 0.0)
    weights = raw.clamp(max=bounds.high) if bounds.low is None else torch.where(bounds.contain(raw), raw, 0.0)
    weights = torch.where(mask, weights, 0.0)
    if not bool(rows.any()):
        return weights, {}
    by_row_weight = segments.row_mean(weights, mask, offsets)[rows]
    metrics = _weight_metrics(weights[mask], raw[mask], bounds)
    metrics |= _row_weight_metrics(by_row_weight, segments.row_mean(raw, mask, offsets)[rows], bounds)
    if whole_rows:  # what is counted in tokens above is one value a row here, from before any cap
        metrics |= _outside(_ratio(by_row[rows]), "rollout_is_ratio_fraction", bounds)
        largest, smallest = by_row[rows].max(), by_row[rows].min()
        metrics["rollout_is_max"] = float(largest.clamp(max=_MAX_LOG_RATIO).exp())
        metrics["rollout_is_min"] = float(smallest.exp())
    if params.rollout_is_batch_normalize:
        mean = float(by_row_weight.mean() if whole_rows else weights[mask].mean())
        metrics["rollout_is_batch_norm_factor"] = mean if mean > 1e-8 else 1.0
        weights = weights / metrics["rollout_is_batch_norm_factor"]
    return weights, metrics


def _outside(raw: Float[Tensor, " N"], name: str, bounds: Bounds) -> dict[str, float]:
    """Shares above and below; below 1 / high where there is no lower end."""
    low = 1.0 / bounds.high if bounds.low is None else bounds.low
    return {
        f"{name}_high": float((raw > bounds.high).double().mean()),
        f"{name}_low": float((raw < low).double().mean()),
    }


def _weight_metrics(weights: Float[Tensor, " N"], raw: Float[Tensor, " N"], bounds: Bounds) -> dict[str, float]:
    """Of the weights as applied, before normalising. The sample size is a share: 1 with equal weights, 0 with none."""
    mean, square = weights.mean(), weights.square().mean()
    metrics = {
        "rollout_is_mean": float(mean),
        "rollout_is_max": float(weights.max()),
        "rollout_is_min": float(weights.min()),
        "rollout_is_std": float(weights.std(correction=0)),
        "rollout_is_eff_sample_size": float(mean.square() / square) if bool(square != 0) else 0.0,
    }
    if bounds.low is not None:
        metrics["rollout_is_oob_ratio"] = float((~bounds.contain(raw)).double().mean())
    return metrics | _outside(raw, "rollout_is_ratio_fraction", bounds)


def _row_weight_metrics(weights: Float[Tensor, " R"], raw: Float[Tensor, " R"], bounds: Bounds) -> dict[str, float]:
    return {
        "rollout_is_seq_mean": float(weights.mean()),
        "rollout_is_seq_std": float(weights.std()) if weights.numel() > 1 else 0.0,
        "rollout_is_seq_max": float(weights.max()),
        "rollout_is_seq_min": float(weights.min()),
        "rollout_is_seq_max_deviation": float((weights - 1.0).abs().max()),
        **_outside(raw, "rollout_is_seq_fraction", bounds),
    }


def _rejection(
    gap: Float[Tensor, " T"], mask: Bool[Tensor, " T"], offsets: Int64[Tensor, " B1"], params: RolloutCorrectionParams
) -> tuple[Bool[Tensor, " T"], dict[str, float]]:
    kept, metrics = mask, {}
    for name, bounds in params.rejections():
        level, estimator = name.rsplit("_", 1)
        values = _estimate(estimator, gap)
        if level == "token":
            by_row = segments.row_mean(values, mask, offsets)
        else:
            by_row = _REDUCTIONS[level](values, mask, offsets)
            values = segments.spread(by_row, offsets, gap.numel())
        allowed = bounds.contain(values) & mask
        kept = kept & allowed
        prefix = f"rollout_rs_{name}"
        metrics |= _statistic_metrics(prefix, values[mask], by_row, mask, offsets, bounds)
        metrics |= _rejected_shares(prefix, allowed, mask, offsets)
    return kept, metrics | _rejected_shares("rollout_rs", kept, mask, offsets)


def _rejected_shares(
    prefix: str, kept: Bool[Tensor, " T"], mask: Bool[Tensor, " T"], offsets: Int64[Tensor, " B1"]
) -> dict[str, float]:
    """Shares of tokens taken out, and of rows that lost any."""
    before, after = segments.row_counts(mask, offsets), segments.row_counts(kept, offsets)
    rows = max(int((before > 0).sum()), 1)
    return {
        f"{prefix}_masked_fraction": 1.0 - float(after.sum()) / max(int(before.sum()), 1),
        f"{prefix}_seq_masked_fraction": float((after < before).sum()) / rows,
    }


def _statistic_metrics(
    prefix: str,
    values: Float[Tensor, " N"],
    by_row: Float[Tensor, " B"],
    mask: Bool[Tensor, " T"],
    offsets: Int64[Tensor, " B+1"],
    bounds: Bounds,
) -> dict[str, float]:
    """Of a statistic on the sampled tokens (`values`) and on rows; std of the values held within the bounds."""
    rows = by_row[segments.row_counts(mask, offsets) > 0]
    if rows.numel() == 0:
        return {}
    units = values if "_token_" in prefix else rows  # what is accepted or rejected
    low = -math.inf if bounds.low is None else bounds.low
    metrics = {
        "mean": values.mean(),
        "max": units.max(),
        "min": units.min(),
        "fraction_high": (units > bounds.high).double().mean(),
        "fraction_low": (units < low).double().mean(),
        "std": values.clamp(low, bounds.high).std(correction=0),
        "seq_mean": rows.mean(),
        "seq_std": rows.std() if rows.numel() > 1 else rows.new_zeros(()),
        "seq_max": rows.max(),
        "seq_min": rows.min(),
        "seq_max_deviation": rows.abs().max(),
        "seq_fraction_high": (rows > bounds.high).double().mean(),
    }
    if bounds.low is not None:
        metrics["seq_fraction_low"] = (rows < bounds.low).double().mean()
    return {f"{prefix}_{name}": float(value) for name, value in metrics.items()}
