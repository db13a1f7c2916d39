"""Tiny tasks with a seed: questions about small images and text arithmetic, as rows and parquet files in verl's format.

`vrl data tiny` writes them, the default run on a machine without a GPU learns them. The answer is the plain word or number
and nothing else ("cyan", "17"). An image belongs to one split by the hash of its pixels and a sum by the hash of its
operands, whatever the seed and the wording: no image and no sum of one split is ever seen in another.
"""

import hashlib
import io
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

Task = Literal["visual", "arithmetic"]
Split = Literal["warm_start", "train", "val"]
Row = dict[str, object]

TASKS: Final[tuple[Task, ...]] = ("visual", "arithmetic")
SPLITS: Final[tuple[Split, ...]] = ("warm_start", "train", "val")
ROWS_PER_TASK: Final[Mapping[Split, int]] = {"warm_start": 4096, "train": 4096, "val": 400}

CELL_PIXELS: Final = 28
GRID_SIDES: Final = (2, 3)
COLORS: Final[Mapping[str, tuple[int, int, int]]] = {
    "red": (220, 20, 20),
    "green": (20, 160, 40),
    "blue": (20, 50, 220),
    "yellow": (240, 230, 30),
    "cyan": (20, 220, 230),
    "pink": (250, 110, 190),
    "orange": (250, 140, 10),
    "purple": (110, 10, 150),
}
GREYS: Final = (0, 70, 140, 210)
ORDINALS: Final = ("first", "second")
ONE_IMAGE_QUESTIONS: Final = ("Which color is in the image?", "What color do you see?")
TWO_IMAGE_QUESTIONS: Final = ("Which color is in the {} image?", "What color does the {} image have?")
OPERANDS: Final = 3
SUM_QUESTIONS: Final = ("What is {}?", "Compute {}.", "{} =")

_SPLIT_BOUNDS: Final[Mapping[Split, tuple[int, int]]] = {"warm_start": (0, 25), "train": (25, 80), "val": (80, 100)}
_BUCKETS: Final = 100

_SCHEMA: Final = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("images", pa.list_(pa.struct([("bytes", pa.binary())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64()), ("kind", pa.string())])),
    ]
)
_MESSAGES: Final = pa.field("messages", _SCHEMA.field("prompt").type)


def rows(task: Task, split: Split, count: int, seed: int) -> Iterator[Row]:
    """Yield `count` rows of one task and split; equal arguments give equal rows.

    Rows of "visual" show one image and two images in turn. `data_source` is `tiny/visual` or `tiny/arithmetic`. Rows of the
    split "warm_start" also carry `messages`, the prompt with the right answer, for supervised training.

    Raises:
        ValueError: an unknown task or split, or a negative count.
    """
    _require(task, TASKS, "task")
    _require(split, SPLITS, "split")
    if count < 0:
        raise ValueError(f"count={count}: the number of rows must not be negative")
    rng = random.Random(f"{task} {split} {seed}")
    make = _visual_row if task == "visual" else _arithmetic_row
    for index in range(count):
        yield make(rng, split, index)


def write_tiny_data(
    out_dir: Path,
    seed: int,
    rows_per_task: Mapping[Split, int] = ROWS_PER_TASK,
    tasks: tuple[Task, ...] = TASKS,
) -> dict[Split, Path]:
    """Write `warm_start.parquet`, `train.parquet` and `val.parquet`, the tasks taking turns, and return their paths.

    Raises:
        ValueError: an unknown task or split.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    paths: dict[Split, Path] = {}
    for split, count in rows_per_task.items():
        streams = [rows(task, split, count, seed) for task in tasks]
        table = [row for group in zip(*streams, strict=True) for row in group]
        schema = _SCHEMA.append(_MESSAGES) if split == "warm_start" else _SCHEMA
        paths[split] = out_dir / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist(table, schema=schema), paths[split])
    return paths


def tokenizer_texts() -> list[str]:
    """Return conversations in the words of the tasks and of a tool call, to train the tiny models' tokenizer on."""
    texts: list[str] = []
    for task in TASKS:
        for row in rows(task, "warm_start", 256, 0):
            texts.extend(f"{message['role']}\n{message['content']}\n" for message in _conversation(row))
    for color in COLORS:
        texts.extend([f"assistant\n{color}\n", f"The answer is {color}."] * 20)
    texts.extend(_tool_texts())
    return texts


def _tool_texts() -> list[str]:
    texts = []
    for number in range(60):
        texts.append(f'assistant\n<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{number} + 1"}}}}\n</tool_call>\n')
        texts.append(f'{{"name": "zoom_in", "arguments": {{"bbox_2d": [{number}, 0, 28, 56], "label": "red"}}}}')
        texts.append(f'{{"name": "python", "arguments": {{"code": "print({number})"}}}}')
        texts.append(f"user\n<tool_response>\n{number}\n</tool_response>\n")
        texts.append("system\nYou are a helpful assistant. Answer the question; use the tools when needed.\n")
        texts.append('{"type": "function", "function": {"name": "calculator", "description": "Compute a sum.", "parameters": ')
        texts.append('{"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}')
        texts.append("# Tools\n\nYou may call functions. Their signatures:\n<tools>\n</tools>\n\n")
        texts.append("For a call return a json object with name and arguments:\n<function-name> <args-json-object>\n")
        texts.append("<think>\nI look at the image.\n</think>\n<answer>yes</answer> <answer>no</answer>\n")
    return texts


def _conversation(row: Row) -> list[dict[str, str]]:
    messages = row["messages"]
    assert isinstance(messages, list)
    return messages


def _visual_row(rng: random.Random, split: Split, index: int) -> Row:
    count = 1 + index % 2
    images, colors = zip(*(_image_of(rng, split) for _ in range(count)), strict=True)
    asked = rng.randrange(count)
    if count == 1:
        question = rng.choice(ONE_IMAGE_QUESTIONS)
    else:
        question = rng.choice(TWO_IMAGE_QUESTIONS).format(ORDINALS[asked])
    prompt = "<image>" * count + question
    row = _row("tiny/visual", prompt, "visual", colors[asked], split, index)
    row["images"] = [{"bytes": image} for image in images]
    row["extra_info"] = {"split": split, "index": index, "kind": "one_image" if count == 1 else "two_images"}
    return row


def _arithmetic_row(rng: random.Random, split: Split, index: int) -> Row:
    while True:
        operands = [rng.randrange(10) for _ in range(OPERANDS)]
        expression = "+".join(map(str, operands))
        if _belongs(expression.encode(), split):
            break
    prompt = rng.choice(SUM_QUESTIONS).format(expression)
    return _row("tiny/arithmetic", prompt, "math", str(sum(operands)), split, index)


def _row(source: str, prompt: str, ability: str, answer: str, split: Split, index: int) -> Row:
    row: Row = {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "images": [],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "kind": "sum"},
    }
    if split == "warm_start":
        row["messages"] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return row


def _image_of(rng: random.Random, split: Split) -> tuple[bytes, str]:
    """Draw a grid of grey cells with one coloured cell until its pixels fall into the split; return its PNG and colour."""
    while True:
        height, width = rng.choice(GRID_SIDES), rng.choice(GRID_SIDES)
        cells = [[(grey, grey, grey) for grey in rng.choices(GREYS, k=width)] for _ in range(height)]
        color = rng.choice(list(COLORS))
        cells[rng.randrange(height)][rng.randrange(width)] = COLORS[color]
        pixels = np.asarray(cells, dtype=np.uint8).repeat(CELL_PIXELS, axis=0).repeat(CELL_PIXELS, axis=1)
        if _belongs(repr(pixels.shape).encode() + pixels.tobytes(), split):
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, format="PNG")
            return buffer.getvalue(), color


def _belongs(content: bytes, split: Split) -> bool:
    low, high = _SPLIT_BOUNDS[split]
    return low <= int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % _BUCKETS < high


def _require(value: str, known: tuple[str, ...], name: str) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(known)}")
