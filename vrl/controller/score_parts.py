"""The parts of each row's score, as numbers: what reward functions return beside it.

`credit.Advantage` and `data_metrics` call it.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vrl.protocol.columns import DATA_SOURCE, SAMPLE_INDEX, SCORE_EXTRA, UID
from vrl.protocol.dataproto import DataProto
from vrl.protocol.errors import RewardError
from vrl.protocol.metrics import as_number


def score_parts(batch: DataProto, keys: Sequence[str], setting: str = "algorithm.gdpo_reward_keys") -> Tensor:
    """Return float64 `[B, C]`: the part of each of the C keys, from the dicts in column `score_extra`.

    True and false are 1 and 0. Raises RewardError naming the first row and key without a finite number, and the
    setting that asks for it.
    """
    extras: list[Mapping[str, Any]] = batch.objects[SCORE_EXTRA].tolist()
    rows = [[as_number(extra.get(key)) for key in keys] for extra in extras]
    for row, numbers in enumerate(rows):
        if None in numbers:
            raise RewardError(_message(batch, row, keys[numbers.index(None)], setting))
    return torch.tensor(rows, dtype=torch.float64).reshape(len(batch), len(keys))


def part_metrics(batch: DataProto) -> dict[str, float]:
    """Return `reward/<part>/mean` for everything beside the scores that is a number: over the rows that have it."""
    numbers: dict[str, list[float]] = {}
    for extra in batch.objects[SCORE_EXTRA]:
        for name, value in extra.items():
            if (number := as_number(value)) is not None:
                numbers.setdefault(name, []).append(number)
    return {f"reward/{name}/mean": statistics.fmean(values) for name, values in sorted(numbers.items())}


def _message(batch: DataProto, row: int, key: str, setting: str) -> str:
    extra = batch.objects[SCORE_EXTRA][row]
    found = f"gave {key}={extra[key]!r}, no finite number" if key in extra else f"gave no {key!r}"
    there = ", ".join(sorted(extra)) or "nothing"
    return (
        f"row {row} of the step (sample {int(batch.dense(SAMPLE_INDEX)[row])} of {batch.objects[UID][row]}, data "
        f"source {batch.objects[DATA_SOURCE][row]}): its reward {found}; beside the score there is {there}. "
        f"Let the reward function return a dict with a number for each name in {setting}, or change the setting"
    )
