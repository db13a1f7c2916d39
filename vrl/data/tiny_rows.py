"""Rows of the tiny tasks in verl's format: splits by content, columns, files with several tasks mixed."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq

Split = Literal["warm_start", "train", "val"]
Row = dict[str, object]

SPLITS: Final[tuple[Split, ...]] = ("warm_start", "train", "val")
# The teacher of the warm start errs this often: what it teaches goes on exploring.
WARM_START_ERRORS: Final = 0.35

_SPLIT_BOUNDS: Final[Mapping[Split, tuple[int, int]]] = {"warm_start": (0, 25), "train": (25, 80), "val": (80, 100)}
_BUCKETS: Final = 100
_MESSAGES: Final = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_SCHEMA: Final = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", _MESSAGES),
        ("images", pa.list_(pa.struct([("bytes", pa.binary())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64()), ("kind", pa.string())])),
        ("env_name", pa.string()),
    ]
)


def belongs(content: bytes, split: Split) -> bool:
    """Return whether an image or a question is in a split: by its hash, whatever the seed."""
    low, high = _SPLIT_BOUNDS[split]
    return low <= int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % _BUCKETS < high


def task_row(
    source: str, prompt: str, answer: str, extra_info: Mapping[str, object], images: Iterable[bytes] = ()
) -> Row:
    """Return a row without an environment; `extra_info` has split, index and kind."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "images": [{"bytes": image} for image in images],
        "ability": source.rpartition("/")[2],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": dict(extra_info),
        "env_name": None,
    }


def taught(row: Row, turns: Iterable[str]) -> Row:
    """Return the row with `messages`: the prompt and the assistant's turns, for supervised training."""
    prompt = row["prompt"]
    assert isinstance(prompt, list)
    return {**row, "messages": [*prompt, *({"role": "assistant", "content": turn} for turn in turns)]}


def write_mixed(path: Path, tasks: Iterable[list[Row]]) -> Path:
    """Write one parquet file in which the rows of all tasks are mixed evenly; `index` is the place in the file."""
    placed: list[tuple[float, int, Row]] = []
    for number, rows in enumerate(tasks):
        placed.extend(((place + 0.5) / len(rows), number, row) for place, row in enumerate(rows))
    mixed = [row for _, _, row in sorted(placed, key=lambda item: item[:2])]
    table = [{**row, "extra_info": {**_info(row), "index": place}} for place, row in enumerate(mixed)]
    schema = _SCHEMA.append(pa.field("messages", _MESSAGES)) if table and "messages" in table[0] else _SCHEMA
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(table, schema=schema), path)
    return path


def _info(row: Row) -> dict[str, object]:
    info = row["extra_info"]
    assert isinstance(info, dict)
    return info
