"""The tiny agent task with a seed: rows to answer at once, rows that need Python, rows that need a closer look.

`vrl data tiny_agent` writes it. Rows of `tiny/code` (`env_name` "python") ask for numbers that a tiny model cannot work
out; a cell prints them. Rows of `tiny/zoom` (`env_name` "zoom") show an image of four quarters, each striped in a color
and its opposite, pixel by pixel: at the model's resolution all of it is one grey, and only the tool that cuts a quarter
out shows its stripes. Rows of `tiny/visual` and `tiny/arithmetic` are those of `tiny_tasks`.
"""

import io
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

import numpy as np
from PIL import Image

from vrl.data.tiny_rows import WARM_START_ERRORS, Row, Split, belongs, task_row, taught, write_mixed
from vrl.data.tiny_tasks import rows as plain_rows

AgentTask = Literal["visual", "arithmetic", "code", "zoom"]

AGENT_TASKS: Final[tuple[AgentTask, ...]] = ("visual", "arithmetic", "code", "zoom")
ROWS_PER_TASK: Final[Mapping[Split, int]] = {"warm_start": 2048, "train": 2048, "val": 400}
WARM_START_SHARE: Final[Mapping[AgentTask, float]] = {"visual": 0.3, "arithmetic": 1.0, "code": 1.0, "zoom": 0.5}
CODE_ENVIRONMENT: Final = "python"
ZOOM_ENVIRONMENT: Final = "zoom"

QUARTER_PIXELS: Final = 112
QUARTERS: Final[Mapping[str, tuple[int, int]]] = {
    "top left": (0, 0),
    "top right": (1, 0),
    "bottom left": (0, 1),
    "bottom right": (1, 1),
}
# A color and its opposite add up to the same grey: only the one that names the stripes is ever asked for.
STRIPES: Final[Mapping[str, tuple[int, int, int]]] = {
    "red": (220, 35, 35),
    "green": (35, 220, 35),
    "blue": (35, 35, 220),
    "orange": (220, 128, 35),
    "purple": (128, 35, 220),
    "pink": (220, 35, 128),
}
OPERATORS: Final[Mapping[str, str]] = {"plus": "+", "minus": "-", "times": "*"}
CODE_QUESTIONS: Final = ("What is {first} {word} {second}?", "Compute {first} {word} {second}.")
ZOOM_QUESTIONS: Final = ("Which color is {place}?", "What color has the quarter {place}?")


def rows(task: AgentTask, split: Split, count: int, seed: int) -> Iterator[Row]:
    """Yield `count` rows of one task and split; equal arguments give equal rows.

    Rows of the split "warm_start" also carry `messages`: the prompt and the turns of a teacher that errs now and then
    (another answer, another number, a call that cannot be read). What the tools said between them is not part of it.

    Raises:
        ValueError: an unknown task or split, or a negative count.
    """
    if task == "visual" or task == "arithmetic":
        yield from plain_rows(task, split, count, seed)
        return
    if task not in AGENT_TASKS:
        raise ValueError(f"task={task!r} is unknown; use one of {', '.join(AGENT_TASKS)}")
    rng = random.Random(f"{task} {split} {seed}")
    make = _code_row if task == "code" else _zoom_row
    for index in range(count):
        row, turns = make(rng, split, index)
        yield taught(row, turns) if split == "warm_start" else row


def write_tiny_agent_data(
    out_dir: Path, seed: int, rows_per_task: Mapping[Split, int] = ROWS_PER_TASK
) -> dict[Split, Path]:
    """Write `warm_start.parquet`, `train.parquet` and `val.parquet`, the tasks mixed evenly, and return their paths."""
    paths: dict[Split, Path] = {}
    for split, count in rows_per_task.items():
        shares = WARM_START_SHARE if split == "warm_start" else dict.fromkeys(AGENT_TASKS, 1.0)
        mixed = [list(rows(task, split, round(count * shares[task]), seed)) for task in AGENT_TASKS]
        paths[split] = write_mixed(out_dir / f"{split}.parquet", mixed)
    return paths


def agent_texts() -> list[str]:
    """Return conversations in the words of the tasks, to train the tiny model's tokenizer on."""
    texts: list[str] = []
    for task in ("code", "zoom"):
        for row in rows(task, "warm_start", 400, 0):
            messages = row["messages"]
            assert isinstance(messages, list)
            texts.extend(f"{message['role']}\n{message['content']}\n" for message in messages)
            texts.append("user\n<tool_response>\n12\n</tool_response>\n")
    return texts


def cell_of(first: int, operator: str, second: int) -> str:
    """Return the turn that computes."""
    return f"```python\nprint({first} {operator} {second})\n```"


def call_of(column: int, row: int) -> str:
    """Return the turn that looks at a quarter."""
    left, top = column * QUARTER_PIXELS, row * QUARTER_PIXELS
    box = f"[{left}, {top}, {left + QUARTER_PIXELS}, {top + QUARTER_PIXELS}]"
    call = f'{{"name": "image_zoom_in_tool", "arguments": {{"bbox_2d": {box}}}}}'
    return f"<tool_call>\n{call}\n</tool_call>"


def _code_row(rng: random.Random, split: Split, index: int) -> tuple[Row, list[str]]:
    while True:
        word = rng.choice(list(OPERATORS))
        second, first = sorted((rng.randrange(11, 100), rng.randrange(11, 100)))
        question = rng.choice(CODE_QUESTIONS).format(first=first, second=second, word=word)
        if belongs(question.encode(), split):
            break
    numbers = {"+": first + second, "-": first - second, "*": first * second}
    answer = str(numbers[OPERATORS[word]])
    row = task_row("tiny/code", question, answer, {"split": split, "index": index, "kind": word})
    turns = [cell_of(first, OPERATORS[word], second), answer]
    if rng.random() < WARM_START_ERRORS:
        turns = _code_error(rng, first, second, turns)
    return {**row, "env_name": CODE_ENVIRONMENT}, turns


def _code_error(rng: random.Random, first: int, second: int, turns: list[str]) -> list[str]:
    guess = str(rng.randrange(10, 10000))
    kind = rng.randrange(4)
    if kind == 0:
        return [guess]
    if kind == 1:
        return [turns[0].replace(")\n", "\n"), guess]
    operator, wrong = rng.choice([("+", first + second), ("-", first - second), ("*", first * second)])
    if kind == 2:
        return [cell_of(first, operator, second), str(wrong)]
    return [turns[0], guess]


def _zoom_row(rng: random.Random, split: Split, index: int) -> tuple[Row, list[str]]:
    image, colors = _draw_quarters(rng, split)
    place = rng.choice(list(QUARTERS))
    question = "<image>" + rng.choice(ZOOM_QUESTIONS).format(place=place)
    answer = colors[place]
    row = task_row("tiny/zoom", question, answer, {"split": split, "index": index, "kind": place}, [image])
    turns = [call_of(*QUARTERS[place]), answer]
    if rng.random() < WARM_START_ERRORS:
        turns = _zoom_error(rng, colors, turns)
    return {**row, "env_name": ZOOM_ENVIRONMENT}, turns


def _zoom_error(rng: random.Random, colors: Mapping[str, str], turns: list[str]) -> list[str]:
    guess = rng.choice(list(STRIPES))
    kind = rng.randrange(4)
    if kind == 0:
        return [guess]
    if kind == 1:
        return [turns[0].replace("]}}", "]}"), guess]
    if kind == 2:
        place = rng.choice(list(QUARTERS))
        return [call_of(*QUARTERS[place]), colors[place]]
    return [turns[0], guess]


def _draw_quarters(rng: random.Random, split: Split) -> tuple[bytes, dict[str, str]]:
    """Draw four striped quarters, until the pixels fall into the split; return the image and each quarter's color."""
    while True:
        pixels = np.zeros((2 * QUARTER_PIXELS, 2 * QUARTER_PIXELS, 3), dtype=np.uint8)
        colors: dict[str, str] = {}
        for place, (column, row) in QUARTERS.items():
            colors[place] = rng.choice(list(STRIPES))
            quarter = pixels[row * QUARTER_PIXELS :, column * QUARTER_PIXELS :][:QUARTER_PIXELS, :QUARTER_PIXELS]
            color = np.asarray(STRIPES[colors[place]], dtype=np.uint8)
            shade = rng.randrange(-8, 9)  # of both, so that no two images are the same
            quarter[:, 0::2] = color
            quarter[:, 1::2] = 255 - color
            quarter[:] = np.clip(quarter.astype(np.int16) + shade, 0, 255).astype(np.uint8)
        if belongs(pixels.tobytes(), split):
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, format="PNG")
            return buffer.getvalue(), colors
