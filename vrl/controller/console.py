"""A step and an evaluation as lines for a person. Called by the tracker."""

import time
from collections import deque
from collections.abc import Mapping
from typing import final

_KL_NAMES = ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl")  # the first that a run has is shown
_SHARES = {
    "gen": ("gen",),
    "logp": ("old_log_prob", "ref", "values"),
    "update": ("update_actor", "update_critic"),
    "sync": ("update_weights",),
}
_STEPS_LOOKED_BACK = 20  # for the time that is left


@final
class TimeLeft:
    """Estimates the seconds to the end from how fast the last steps came, evaluations and checkpoints included."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._marks: deque[tuple[int, float]] = deque(maxlen=_STEPS_LOOKED_BACK)

    def after(self, step: int, step_seconds: float, now: float | None = None) -> float:
        """Return the seconds from the end of `step`, which took `step_seconds`, to the end of the run."""
        self._marks.append((step, time.monotonic() if now is None else now))
        (first, begin), (last, end) = self._marks[0], self._marks[-1]
        per_step = (end - begin) / (last - first) if last > first else step_seconds
        return per_step * max(self._total_steps - step, 0)


def step_line(metrics: Mapping[str, float], step: int, total_steps: int, seconds_left: float) -> str:
    """Return the line of a training step. What the metrics lack is left out."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    for label, name, form in (
        ("score", "critic/score/mean", ".3f"),
        ("length", "response_length/mean", ".1f"),
        ("entropy", "actor/entropy", ".3f"),
        ("kl", next((name for name in _KL_NAMES if name in metrics), ""), ".1e"),
        ("grad", "actor/grad_norm", ".2f"),
    ):
        if name in metrics:
            parts.append(f"{label} {metrics[name]:{form}}")
        if label == "length" and metrics.get("response_length/clip_ratio"):
            parts[-1] += f" ({metrics['response_length/clip_ratio']:.0%} cut)"
    seconds = metrics.get("timing_s/step", 0.0)
    if seconds > 0.0:
        parts.append(f"{seconds:.1f} s ({_shares(metrics, seconds)})")
        if "perf/total_num_tokens" in metrics:
            parts.append(f"{metrics['perf/total_num_tokens'] / seconds:,.0f} tok/s")
    if metrics.get("training/failed_rows"):
        parts.append(f"{metrics['training/failed_rows']:.0f} rows failed")
    if step < total_steps:
        parts.append(f"left {_duration(seconds_left)}")
    return " | ".join(parts)


def validation_lines(metrics: Mapping[str, float], step: int) -> list[str]:
    """Return a line for each data source: its `val-core` metrics without their spreads, and its number of rows."""
    by_source: dict[str, list[str]] = {}
    for name, value in metrics.items():
        part, _, rest = name.partition("/")
        if part == "val-core" and not rest.endswith("/std"):
            source, variable, metric = rest.removesuffix("/mean").rsplit("/", 2)
            by_source.setdefault(source, []).append(f"{variable} {metric} {value:.3f}")
    out = []
    for source, found in by_source.items():
        rows, failed = (metrics.get(f"val-aux/{source}/{name}", 0.0) for name in ("num_rows", "failed_rows"))
        counts = [f"{rows:.0f} rows" + (f", {failed:.0f} failed" if failed else "")] if rows else []
        out.append(" | ".join([f"held out after step {step}, {source}", *found, *counts]))
    return out


def _shares(metrics: Mapping[str, float], seconds: float) -> str:
    spent = {label: sum(metrics.get(f"timing_s/{stage}", 0.0) for stage in stages) for label, stages in _SHARES.items()}
    return " ".join(f"{label} {part / seconds:.0%}" for label, part in spent.items() if part > 0.0)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
