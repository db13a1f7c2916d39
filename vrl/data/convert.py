"""Converters of public datasets on disk to parquet files in verl's format, for `vrl data gsm8k` and `vrl data geo3k`.

The input is what Hugging Face datasets are shipped as: a parquet, jsonl or json file, or a folder with such files, with
the split as a word of their names (`train-00000-of-00001.parquet`; a single file without one is taken as `train`).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from vrl.data.files import SUFFIXES, open_table, write_parquet
from vrl.data.images import image_cells, read_image
from vrl.protocol.errors import DataError
from vrl.protocol.trajectory import IMAGE_MARK

SPLITS: Final = ("train", "validation", "test")
GSM8K_INSTRUCTION: Final = 'Let\'s think step by step and output the final answer after "####".'
GEO3K_INSTRUCTION: Final = (
    "First reason about the problem inside <think> </think> tags, then give the final answer in \\boxed{}."
)

RowConverter = Callable[[Mapping[str, Any], Path], dict[str, Any]]

_MESSAGES: Final = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_SCHEMA: Final = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", _MESSAGES),
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        (
            "extra_info",
            pa.struct([(name, pa.string()) for name in ("split", "question", "answer")] + [("index", pa.int64())]),
        ),
    ]
)


def convert(name: str, source: Path, out_dir: Path) -> dict[str, int]:
    """Write `<out_dir>/<split>.parquet` for every split of the dataset `name` found in `source`; return rows a split.

    Raises:
        DataError: an unknown name, no input file, or a row that lacks something, named by file and row.
    """
    if name not in CONVERTERS:
        raise DataError(f"no converter named '{name}'; there are {', '.join(CONVERTERS)}")
    counts = {}
    for split, paths in _inputs(source).items():
        rows = list(_converted(paths, CONVERTERS[name], split))
        write_parquet(rows, out_dir / f"{split}.parquet", _SCHEMA)
        counts[split] = len(rows)
    return counts


def gsm8k_row(row: Mapping[str, Any], _folder: Path) -> dict[str, Any]:
    """Convert `question` and `answer` of openai/gsm8k; the ground truth is the number after `####`."""
    question, answer = _text(row, "question"), _text(row, "answer")
    _, mark, number = answer.rpartition("####")
    if not mark:
        raise DataError(f"the answer {answer!r:.80} has no '####' before its number")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number.strip().replace(",", "")},
        "extra_info": {"question": question, "answer": answer},
    }


def geo3k_row(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Convert `problem`, `answer` and `images` of hiyouga/geometry3k; images are stored in the file."""
    problem, answer = _text(row, "problem"), _text(row, "answer")
    images = [{"bytes": read_image(cell, folder), "path": None} for cell in image_cells(row.get("images"))]
    marks = problem.count(IMAGE_MARK)
    if marks not in (0, len(images)):
        raise DataError(f"{marks} {IMAGE_MARK} marks in 'problem', but {len(images)} images in 'images'")
    lead = "" if marks else IMAGE_MARK * len(images)
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"{lead}{problem} {GEO3K_INSTRUCTION}"}],
        "images": images,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"question": problem, "answer": answer},
    }


CONVERTERS: Final[Mapping[str, RowConverter]] = {"gsm8k": gsm8k_row, "geo3k": geo3k_row}


def _inputs(source: Path) -> dict[str, list[Path]]:
    if not source.exists():
        raise DataError(f"{source}: no such file or folder; download the dataset and name the file or its folder")
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.suffix in SUFFIXES)
    found = {split: [path for path in files if split in re.split("[^a-z]+", path.stem.lower())] for split in SPLITS}
    found = {split: paths for split, paths in found.items() if paths}
    if source.is_file() and not found:
        return {"train": files}
    if not found:
        raise DataError(f"{source}: no {' or '.join(SUFFIXES)} file with {', '.join(SPLITS)} in its name")
    return found


def _converted(paths: list[Path], converter: RowConverter, split: str) -> Iterator[dict[str, Any]]:
    index = 0
    for path in paths:
        table = open_table(path)
        for number in range(len(table)):
            try:
                row = converter(table.row(number), path.parent)
            except DataError as error:
                raise DataError(f"{path}, row {number}: {error}") from error
            row["extra_info"] |= {"split": split, "index": index}
            yield row
            index += 1


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"column '{column}' holds {value!r:.80}, not text (columns: {', '.join(row)})")
    return value.strip()
