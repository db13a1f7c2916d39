"""What environments reported of a step's turns. Pure functions from a batch to numbers; `data_metrics` calls it."""

import math
from collections.abc import Mapping
from typing import Any

from vrl.protocol.columns import TURN_INFO, TURN_REWARDS
from vrl.protocol.dataproto import DataProto
from vrl.protocol.metrics import as_number

_SECONDS = {"tool_seconds": "tool/seconds", "queue_seconds": "tool/queue_seconds"}


def turn_metrics(batch: DataProto) -> dict[str, float]:
    """Return times, rewards and reported numbers over all turns of the rows that an environment has seen.

    `env/<name>` is the mean of what `StepResult.info` holds under that name, over the turns that have it: 0 and 1 (or
    false and true) a turn become a share; so `env/cut` is that of turns which the limit of their tokens ended.
    `tool/seconds` is the time in environments, `tool/queue_seconds` the time
    that a turn waited for it. Without such turns there is no metric.
    """
    if TURN_INFO not in batch:
        return {}
    numbers: dict[str, list[float]] = {}
    for info in (info for row in batch.objects[TURN_INFO] for info in row):
        for name, number in _numbers(info):
            numbers.setdefault(name, []).append(number)
    rewards = [reward for row in batch.objects[TURN_REWARDS] for reward in row]
    out = {"turn_reward/mean": _mean(rewards), "turn_reward/max": max(rewards)} if rewards else {}
    for name, values in sorted(numbers.items()):
        if name in _SECONDS:
            out |= {f"{_SECONDS[name]}/mean": _mean(values), f"{_SECONDS[name]}/max": max(values)}
        else:
            out[f"env/{name}"] = _mean(values)
    return out


def _numbers(info: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(name, number) for name, value in info.items() if (number := as_number(value)) is not None]


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
