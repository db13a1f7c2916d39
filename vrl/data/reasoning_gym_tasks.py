"""One-digit sums and differences from reasoning-gym, in verl's format: the data of the small instruct model's config.

`vrl data reasoning_gym` writes them. reasoning-gym takes seconds to import, so import this module only there.

Splits are disjoint by the sum, whatever its wording: the terms with their signs, sorted, are hashed into a split, so
that "3 + 4" and "4 + 3" are on one side. With one digit there are 155 such sums of two terms; five
wordings each make the questions, and no question occurs twice in a split. The instruction is the system message: put
behind the question, a small instruct model answers in a sentence, and its template adds a system message of its own.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import reasoning_gym

from vrl.data.files import write_parquet
from vrl.protocol.errors import DataError

Split = Literal["warm_start", "train", "val"]

DATA_SOURCE: Final = "reasoning_gym/chain_sum"
ROWS_PER_SPLIT: Final[Mapping[Split, int]] = {"warm_start": 80, "train": 380, "val": 240}
TERMS: Final = 2
WORDINGS: Final = ("What is {}?", "Compute {}.", "{} =", "Calculate {}.", "How much is {}?")
INSTRUCTION: Final = "Answer with only the number."

_SPLIT_BOUNDS: Final[Mapping[Split, tuple[int, int]]] = {"warm_start": (0, 15), "train": (15, 70), "val": (70, 100)}
_BUCKETS: Final = 100
_DRAWS: Final = 20_000  # more than enough to meet every sum in every wording


def arithmetic_rows(split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` rows; equal arguments give equal rows.

    Raises:
        DataError: an unknown split, or the split holds fewer different questions.
    """
    if split not in _SPLIT_BOUNDS:
        raise DataError(f"split={split!r} is unknown; use one of {', '.join(_SPLIT_BOUNDS)}")
    drawn = list(itertools.islice(_questions(split, seed), count))
    if len(drawn) < count:
        raise DataError(
            f"split {split}: {count} rows asked for, but there are only {len(drawn)} different questions; ask for "
            f"{len(drawn)} rows or fewer"
        )
    return [_row(item, split, index) for index, item in enumerate(drawn)]


def write_reasoning_gym_data(
    out_dir: Path, seed: int, rows_per_split: Mapping[Split, int] = ROWS_PER_SPLIT
) -> dict[Split, Path]:
    """Write `<split>.parquet` for every split and return the paths."""
    paths = {}
    for split, count in rows_per_split.items():
        paths[split] = out_dir / f"{split}.parquet"
        write_parquet(arithmetic_rows(split, count, seed), paths[split])
    return paths


def _questions(split: Split, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the different questions of a split in random order, with their answers."""
    settings = {"min_terms": TERMS, "max_terms": TERMS, "min_digits": 1, "max_digits": 1}
    first = random.Random(f"{split} {seed}").randrange(2**31)
    seen = set()
    for item in reasoning_gym.create_dataset("chain_sum", seed=first, size=_DRAWS, **settings):
        expression = item["metadata"]["expression"]
        question = WORDINGS[item["metadata"]["source_index"] % len(WORDINGS)].format(expression)
        if question not in seen and _belongs(expression, split):
            seen.add(question)
            yield question, item["answer"]


def _belongs(expression: str, split: Split) -> bool:
    signed = sorted(("+ " + expression).replace(" ", "").replace("+", " +").replace("-", " -").split())
    low, high = _SPLIT_BOUNDS[split]
    return low <= int.from_bytes(hashlib.sha256(" ".join(signed).encode()).digest()[:8], "big") % _BUCKETS < high


def _row(item: tuple[str, str], split: Split, index: int) -> dict[str, Any]:
    question, answer = item
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index},
    }
