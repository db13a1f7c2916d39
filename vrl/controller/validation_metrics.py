"""Scores of held-out rows to `val-core/<data_source>/<var>/<metric>` and `val-aux/...`, in verl's names. Torch-free.

Prompts are told apart by their uid. `best@k`, `worst@k` and `maj@k` are what k draws with replacement from a prompt's
samples give on average: exact, where verl draws 1000 times. Called by the evaluation.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from vrl.protocol.metrics import as_number

_CORE_METRICS = ("mean", "maj", "best")


def validation_metrics(
    *,
    data_sources: Sequence[str],
    uids: Sequence[str],
    scores: Sequence[float | None],
    extras: Sequence[Mapping[str, Any]],
    num_turns: Sequence[int] = (),
) -> dict[str, float]:
    """Return the metrics of an evaluation, one entry a row in every argument.

    The variables are `reward` (the score) and every extra that is a number; where rows carry a text `pred`, its
    majority vote is scored too. In the part `val-core` stand mean, best and maj over all N samples of `acc`, or of
    `reward` where there is no `acc`.

    A score of None is an episode that failed outside the model. It is counted in `val-aux/<data_source>/failed_rows`
    and left out of the numbers of its prompt, which stay under the N that the prompt was sampled with.
    """
    sources: dict[str, dict[str, list[int]]] = {}
    for row, (source, uid) in enumerate(zip(data_sources, uids, strict=True)):
        sources.setdefault(source, {}).setdefault(uid, []).append(row)
    out: dict[str, float] = {}
    for source, prompts in sorted(sources.items()):
        rows = [row for members in prompts.values() for row in members]
        out[f"val-aux/{source}/num_rows"] = float(len(rows))
        out[f"val-aux/{source}/failed_rows"] = float(sum(scores[row] is None for row in rows))
        by_variable = {
            name: _averages(prompts, values, extras) for name, values in _variables(rows, scores, extras).items()
        }
        core = "acc" if "acc" in by_variable else "reward"
        for name, averages in by_variable.items():
            largest = max((_samples_of(metric) for metric in averages), default=0)
            for metric, value in averages.items():
                part = "val-core" if name == core and _is_core(metric, largest) else "val-aux"
                out[f"{part}/{source}/{name}/{metric}"] = value
    if num_turns:
        ends = {"min": float(min(num_turns)), "max": float(max(num_turns)), "mean": statistics.fmean(num_turns)}
        out |= {f"val-aux/num_turns/{name}": value for name, value in ends.items()}
    return out


def sample_statistics(values: Sequence[float], predictions: Sequence[str], samples: int) -> dict[str, float]:
    """Return one prompt's statistics: of its `values`, and of the vote of its `predictions` if there are any.

    `samples` is the N of the names; it may be larger than the number of values.
    """
    array = np.asarray(values, dtype=np.float64)
    out = {f"mean@{samples}": statistics.fmean(values)}
    if samples == 1:
        return out
    out[f"std@{samples}"] = float(array.std())
    ordered = np.sort(array)
    for draws in _draw_counts(samples):
        chances = _largest_chances(len(values), draws)
        out |= _moments(f"best@{draws}", ordered, chances)
        out |= _moments(f"worst@{draws}", ordered, chances[::-1])
        if predictions:
            out |= _moments(f"maj@{draws}", array, _vote_chances(predictions, draws))
    return out


def _variables(
    rows: Sequence[int], scores: Sequence[float | None], extras: Sequence[Mapping[str, Any]]
) -> dict[str, dict[int, float]]:
    """Return the numbers of each variable by row. An extra counts when it is a number in all rows that have it."""
    scored = {row: score for row in rows if (score := scores[row]) is not None}
    names = sorted({name for row in scored for name in extras[row]} - {"reward"})
    out: dict[str, dict[int, float]] = {"reward": scored} if scored else {}
    for name in names:
        values = {row: as_number(extras[row][name]) for row in scored if name in extras[row]}
        found = {row: value for row, value in values.items() if value is not None}
        if len(found) == len(values):
            out[name] = found
    return out


def _averages(
    prompts: Mapping[str, Sequence[int]], values: Mapping[int, float], extras: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Return each metric's mean over the prompts that have it."""
    found: dict[str, list[float]] = {}
    for members in prompts.values():
        rows = [row for row in members if row in values]
        if not rows:
            continue
        voted = all(isinstance(extras[row].get("pred"), str) for row in rows)
        predictions = [extras[row]["pred"] for row in rows] if voted else []
        for metric, value in sample_statistics([values[row] for row in rows], predictions, len(members)).items():
            found.setdefault(metric, []).append(value)
    return {metric: statistics.fmean(numbers) for metric, numbers in found.items()}


def _samples_of(metric: str) -> int:
    return int(metric.partition("@")[2].partition("/")[0])


def _is_core(metric: str, samples: int) -> bool:
    return metric.partition("@")[0] in _CORE_METRICS and _samples_of(metric) == samples


def _draw_counts(samples: int) -> list[int]:
    """Return 2, 4, 8, ... below `samples`, and `samples`."""
    return [*(2**i for i in range(1, samples.bit_length()) if 2**i < samples), samples]


def _moments(name: str, outcomes: npt.NDArray[np.float64], chances: npt.NDArray[np.float64]) -> dict[str, float]:
    mean = float(chances @ outcomes)
    return {f"{name}/mean": mean, f"{name}/std": math.sqrt(float(chances @ (outcomes - mean) ** 2))}


def _largest_chances(count: int, draws: int) -> npt.NDArray[np.float64]:
    """Return `[count]`: the chance that the i-th smallest of `count` values is the largest of the draws."""
    return np.diff((np.arange(count + 1) / count) ** draws)


def _vote_chances(predictions: Sequence[str], draws: int) -> npt.NDArray[np.float64]:
    """Return the chance of each sample to be the vote's outcome: the first drawn of the most frequent prediction."""
    counts = {text: predictions.count(text) for text in predictions}
    ordered = sorted(counts, key=counts.__getitem__)
    chances = _win_chances(tuple(counts[text] for text in ordered), draws)
    by_text = dict(zip(ordered, chances, strict=True))
    return np.array([by_text[text] / counts[text] for text in predictions])


@lru_cache(maxsize=4096)
def _win_chances(counts: tuple[int, ...], draws: int) -> tuple[float, ...]:
    """Return the chance of each prediction to win the vote: the most frequent of the draws, of several the first drawn.

    The numbers of draws of each prediction are independent Poisson variables, given that they add up to `draws`. All
    orders of given draws are equally likely, so that each of the most frequent is drawn first equally often.
    """
    rates = [draws * count / sum(counts) for count in counts]
    weights = [_poisson(rate, draws) for rate in rates]
    by_count: dict[int, float] = {}
    for place, count in enumerate(counts):
        if count not in by_count:
            others = [*weights[:place], *weights[place + 1 :]]
            wins = (weights[place][most] * _others_below(others, most, draws - most) for most in range(1, draws + 1))
            by_count[count] = sum(wins) / float(_poisson(draws, draws)[draws])
    return tuple(by_count[count] for count in counts)


def _others_below(others: Sequence[npt.NDArray[np.float64]], most: int, draws: int) -> float:
    """Return the weight of all ways in which the others take `draws` draws, none more than `most`, and ties are won."""
    ties = min(len(others), draws // most)
    table = np.zeros((ties + 1, draws + 1))  # predictions drawn exactly `most` times, draws taken so far
    table[0, 0] = 1.0
    shift = np.subtract.outer(np.arange(draws + 1), np.arange(draws + 1)).T  # draws that one more prediction takes
    fewer = (shift >= 0) & (shift < most)
    for weight in others:
        step = np.where(fewer, weight[np.clip(shift, 0, None)], 0.0)
        after = table @ step
        if ties:
            after[1:, most:] += table[:-1, : draws + 1 - most] * weight[most]
        table = after
    return float(np.sum(table[:, draws] / np.arange(1, ties + 2)))


def _poisson(rate: float, largest: int) -> npt.NDArray[np.float64]:
    numbers = range(largest + 1)
    return np.array([math.exp(n * math.log(rate) - rate - math.lgamma(n + 1)) for n in numbers])
