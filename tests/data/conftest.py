"""Files and images as users have them, for the tests of the data package."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

Row = dict[str, Any]


@pytest.fixture
def image() -> Callable[..., bytes]:
    """Make an encoded image of a size."""

    def make(
        width: int = 28, height: int = 28, kind: str = "PNG", color: tuple[int, int, int] = (200, 30, 30)
    ) -> bytes:
        buffer = io.BytesIO()
        Image.new("RGB", (width, height), color).save(buffer, format=kind)
        return buffer.getvalue()

    return make


@pytest.fixture
def row() -> Callable[..., Row]:
    """Make a row in verl's format."""

    def make(index: int = 0, text: str = "What is 1 + 1?", **columns: Any) -> Row:
        return {
            "data_source": "math/sums",
            "prompt": [{"role": "user", "content": text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"split": "train", "index": index},
            **columns,
        }

    return make


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write rows to a parquet, jsonl or json file in the test's folder."""

    def write(name: str, rows: list[Row]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            names = dict.fromkeys(name for item in rows for name in item)
            pq.write_table(pa.table({name: [item.get(name) for item in rows] for name in names}), path)
        elif path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(item) + "\n" for item in rows))
        else:
            path.write_text(json.dumps(rows))
        return path

    return write
