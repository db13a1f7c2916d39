"""Tiny tasks with a seed: questions about small images and text arithmetic, as rows and parquet files in verl's format.

`vrl data tiny` writes them, the default run on a machine without a GPU learns them. The answer is the plain word or
number and nothing else ("cyan", "7"). An image belongs to one split by the hash of its pixels and a word problem by the
hash of its text, whatever the seed: no image and no question of arithmetic of one split is ever seen in another.
"""

import io
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

import numpy as np
from PIL import Image

from vrl.data.tiny_rows import SPLITS, WARM_START_ERRORS, Row, Split, belongs, task_row, taught, write_mixed

Task = Literal["visual", "arithmetic"]

TASKS: Final[tuple[Task, ...]] = ("visual", "arithmetic")
ROWS_PER_TASK: Final[Mapping[Split, int]] = {"warm_start": 4096, "train": 4096, "val": 400}
# Colours are learned from far fewer rows than sums: with this share both are half learned at the same time.
WARM_START_SHARE: Final[Mapping[Task, float]] = {"visual": 0.15, "arithmetic": 1.0}

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
ONE_IMAGE_QUESTIONS: Final = ("Which color is in the image?", "What color do you see?")
TWO_IMAGE_QUESTIONS: Final = ("Which color is in one of the images?", "What color do you see in the two images?")
LARGEST_SUM: Final = 8
NAMES: Final = ("Ann", "Ben", "Eva", "Ida", "Jim", "Kim", "Leo", "Max", "Mia", "Sam", "Tom", "Zoe")
THINGS: Final = (
    "apples",
    "balls",
    "books",
    "cards",
    "coins",
    "eggs",
    "figs",
    "nuts",
    "pears",
    "pens",
    "plums",
    "shells",
)
SUM_QUESTIONS: Final = (
    "{name} has {first} {thing} and {second} {other}. How many things?",
    "{name} has {first} {thing} and gets {second} more. How many {thing}?",
)


def rows(task: Task, split: Split, count: int, seed: int) -> Iterator[Row]:
    """Yield `count` rows of one task and split; equal arguments give equal rows.

    Rows of "visual" show one image and two images in turn. `data_source` is `tiny/visual` or `tiny/arithmetic`. Rows
    of the split "warm_start" also carry `messages`, the prompt with an answer for supervised training: the right one in
    two rows of three, any answer in the others.

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
        row = make(rng, split, index)
        yield _taught(rng, task, row) if split == "warm_start" else row


def write_tiny_data(
    out_dir: Path,
    seed: int,
    rows_per_task: Mapping[Split, int] = ROWS_PER_TASK,
    tasks: tuple[Task, ...] = TASKS,
) -> dict[Split, Path]:
    """Write `warm_start.parquet`, `train.parquet` and `val.parquet`, the tasks mixed evenly, and return their paths.

    Raises:
        ValueError: an unknown task or split.
    """
    paths: dict[Split, Path] = {}
    for split, count in rows_per_task.items():
        shares = WARM_START_SHARE if split == "warm_start" else dict.fromkeys(tasks, 1.0)
        mixed = [list(rows(task, split, round(count * shares[task]), seed)) for task in tasks]
        paths[split] = write_mixed(out_dir / f"{split}.parquet", mixed)
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
    schema = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
    calculator = {"name": "calculator", "description": "Compute a sum.", "parameters": schema}
    constant = (
        "system\nYou are a helpful assistant. Answer the question; use the tools when needed.\n",
        json.dumps({"type": "function", "function": calculator}),
        "# Tools\n\nYou may call functions. Their signatures:\n<tools>\n</tools>\n\n",
        "For a call return a json object with name and arguments:\n<function-name> <args-json-object>\n",
        "<think>\nI look at the image.\n</think>\n<answer>yes</answer> <answer>no</answer>\n",
    )
    texts: list[str] = []
    for number in range(60):
        calls = (
            {"name": "calculator", "arguments": {"expression": f"{number} + 1"}},
            {"name": "zoom_in", "arguments": {"bbox_2d": [number, 0, 28, 56], "label": "red"}},
            {"name": "python", "arguments": {"code": f"print({number})"}},
        )
        texts.extend(f"assistant\n<tool_call>\n{json.dumps(call)}\n</tool_call>\n" for call in calls)
        texts.append(f"user\n<tool_response>\n{number}\n</tool_response>\n")
        texts.extend(constant)
    return texts


def _conversation(row: Row) -> list[dict[str, str]]:
    messages = row["messages"]
    assert isinstance(messages, list)
    return messages


def _visual_row(rng: random.Random, split: Split, index: int) -> Row:
    count = 1 + index % 2
    color = rng.choice(list(COLORS))
    images = [_draw_image(rng, split, color)]
    if count == 2:
        images.insert(rng.randrange(2), _draw_image(rng, split, None))
    question = rng.choice(ONE_IMAGE_QUESTIONS if count == 1 else TWO_IMAGE_QUESTIONS)
    info = {"split": split, "index": index, "kind": "one_image" if count == 1 else "two_images"}
    return task_row("tiny/visual", "<image>" * count + question, color, info, images)


def _arithmetic_row(rng: random.Random, split: Split, index: int) -> Row:
    while True:
        total = rng.randrange(2, LARGEST_SUM + 1)
        first = rng.randrange(1, total)
        thing, other = rng.sample(THINGS, 2)
        words = {"name": rng.choice(NAMES), "thing": thing, "other": other}
        question = rng.choice(SUM_QUESTIONS).format(first=first, second=total - first, **words)
        if belongs(question.encode(), split):
            info = {"split": split, "index": index, "kind": "sum"}
            return task_row("tiny/arithmetic", question, str(total), info)


def _taught(rng: random.Random, task: Task, row: Row) -> Row:
    """Add the conversation that supervised training learns; its answer is a random one now and then."""
    reward = row["reward_model"]
    assert isinstance(reward, dict)
    answer = reward["ground_truth"]
    if rng.random() < WARM_START_ERRORS:
        answer = rng.choice(list(COLORS)) if task == "visual" else str(rng.randrange(2, LARGEST_SUM + 1))
    return taught(row, [answer])


def _draw_image(rng: random.Random, split: Split, color: str | None) -> bytes:
    """Draw grids of grey cells, one of them coloured if a colour is given, until the pixels fall into the split."""
    while True:
        height, width = rng.choice(GRID_SIDES), rng.choice(GRID_SIDES)
        cells = [(grey, grey, grey) for grey in rng.choices(GREYS, k=height * width)]
        if color is not None:
            cells[rng.randrange(height * width)] = COLORS[color]
        grid = np.asarray(cells, dtype=np.uint8).reshape(height, width, 3)
        pixels = grid.repeat(CELL_PIXELS, axis=0).repeat(CELL_PIXELS, axis=1)
        if belongs(repr(pixels.shape).encode() + pixels.tobytes(), split):
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, format="PNG")
            return buffer.getvalue()


def _require(value: str, known: tuple[str, ...], name: str) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(known)}")
