"""Grids of ARC tasks: whole numbers in rows, written as JSON or as lines of digits."""

import json
import re
from typing import Any

from vrl.agent.rewards.answers import read_answer
from vrl.agent.rewards.registry import register_reward

Grid = list[list[int]]

_MAX_SIDE = 30  # cells, as in ARC
_MAX_CHARACTERS = 20_000  # of the end of a text, where the answer stands
_JSON_START = re.compile(r"\[\s*\[")
_ROW = re.compile(r"[\s|\[]*[0-9](?:[\s,|]*[0-9])*[\s|\],]*")


def read_grid(text: str) -> Grid | None:
    """Return the last grid of a text: a JSON list of lists, else the last lines of single digits; None without one."""
    text = text[-_MAX_CHARACTERS:]
    for start in reversed([match.start() for match in _JSON_START.finditer(text)][-5:]):
        try:
            value, _ = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if _is_grid(value):
            return value
    return _digit_lines(text)


def _digit_lines(text: str) -> Grid | None:
    rows: Grid = []
    for line in reversed(text.splitlines()):
        row = [int(digit) for digit in re.findall("[0-9]", line)] if _ROW.fullmatch(line) else []
        if row and (not rows or len(row) == len(rows[0])):
            rows.insert(0, row)
        elif rows:
            break
    return rows if _is_grid(rows) else None


def _is_grid(value: Any) -> bool:
    if not isinstance(value, list) or not 1 <= len(value) <= _MAX_SIDE:
        return False
    if not all(isinstance(row, list) and 1 <= len(row) <= _MAX_SIDE for row in value):
        return False
    return len({len(row) for row in value}) == 1 and all(type(cell) is int for row in value for cell in row)


@register_reward("arc", "arc/*")
def compute_score(*, solution_str: str, ground_truth: Any, partial: bool = False, **_: Any) -> dict[str, float]:
    """Return 1 for the right grid, else 0, or with `partial` the share of right cells; the share stands beside it.

    A grid of another shape has no right cell. Raises ValueError when the ground truth is no grid.
    """
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    truth = [list(row) for row in truth]
    if not _is_grid(truth):
        raise ValueError("arc: the ground truth is no grid of whole numbers")
    grid = read_grid(read_answer(solution_str) or "")
    share = 0.0
    if grid is not None and [len(row) for row in grid] == [len(row) for row in truth]:
        cells = [
            mine == right
            for row, wanted in zip(grid, truth, strict=True)
            for mine, right in zip(row, wanted, strict=True)
        ]
        share = sum(cells) / len(cells)
    acc = float(grid == truth)
    return {"score": share if partial else acc, "acc": acc, "cell_accuracy": share, "has_grid": float(grid is not None)}
