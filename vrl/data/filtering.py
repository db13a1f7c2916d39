"""Checks every row once before training: a prompt that can be read, and that fits after its images are expanded.

The controller runs it at start on train and validation data, so that no bad row is met in the middle of a run.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Literal

from vrl.data.dataset import RowDataset
from vrl.protocol.errors import DataError
from vrl.protocol.ports import Renderer

BadRow = Literal["skip", "stop"]
Overlong = Literal["skip", "stop", "cut"]
Truncation = Literal["error", "left", "right", "middle"]

Tools = Mapping[str, Sequence[Mapping[str, Any]]]

_ROWS_AT_ONCE: Final = 64  # a worker: what is measured and not yet counted
_EXAMPLES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterReport:
    """What a filter found, in rows. `kept + overlong + broken` is the number of rows looked at."""

    kept: int
    overlong: int
    broken: int
    cut: int  # kept text rows that are longer than the limit, for `truncate`
    longest: int  # tokens of the longest prompt seen, images expanded
    most_images: int  # images of the kept row that has most
    examples: tuple[str, ...]  # messages of the first rows left out
    data_sources: frozenset[str]  # of the kept rows

    @property
    def total(self) -> int:
        """Rows looked at."""
        return self.kept + self.overlong + self.broken

    def summary(self) -> str:
        """Return one readable line."""
        cut = f", {self.cut} to be truncated" if self.cut else ""
        counts = f"{self.overlong} too long, {self.broken} broken{cut}"
        return f"{self.kept} of {self.total} rows kept ({counts}), longest prompt {self.longest} tokens"


def overlong_policy(filter_overlong_prompts: bool, truncation: Truncation) -> Overlong:
    """Return what two settings of verl say together: filtering comes first, then truncation, "error" refuses."""
    if filter_overlong_prompts:
        return "skip"
    return "stop" if truncation == "error" else "cut"


def filter_rows(
    dataset: RowDataset,
    renderer: Renderer,
    max_prompt_length: int,
    *,
    overlong: Overlong = "skip",
    bad_row: BadRow = "skip",
    workers: int = 1,
    tools: Tools | None = None,
) -> tuple[RowDataset, FilterReport]:
    """Return the rows that can be used, and the counts. The length of a prompt counts every visual token.

    Args:
        dataset: all rows; each is read and rendered once.
        renderer: called from `workers` threads.
        max_prompt_length: tokens.
        overlong: what to do about longer prompts: "skip" leaves them out, "stop" raises, "cut" keeps them for
            `truncate` where they have no images and raises where they have.
        bad_row: what to do about rows, images and messages that cannot be read: "skip" leaves them out, "stop" raises.
        workers: threads that read and measure (`data.filter_overlong_prompts_workers`).
        tools: function schemas that the prompts of rows with an environment show, by `env_name`; they count, too.

    Raises:
        DataError: no row is left, or a row cannot be used and its policy says so.
    """
    kept: list[int] = []
    faults: list[str] = []
    sources: set[str] = set()
    broken = cut = longest = most_images = 0
    for index, row in enumerate(_measured(dataset, renderer, workers, tools or {})):
        if isinstance(row, DataError):
            broken += 1
            faults.append(str(row))
            continue
        longest = max(longest, row.length)
        fits = row.length <= max_prompt_length
        if fits or (overlong == "cut" and not row.images):
            kept.append(index)
            sources.add(row.data_source)
            cut += not fits
            most_images = max(most_images, row.images)
        else:
            lengths = f"{row.length} tokens, data.max_prompt_length is {max_prompt_length}"
            faults.append(f"{dataset.where(index)}: the prompt ({row.images} images) has {lengths}")
    report = FilterReport(
        kept=len(kept),
        overlong=len(faults) - broken,
        broken=broken,
        cut=cut,
        longest=longest,
        most_images=most_images,
        examples=tuple(faults[:_EXAMPLES]),
        data_sources=frozenset(sources),
    )
    _refuse(report, overlong, bad_row)
    return dataset.select(kept), report


def truncate(ids: Sequence[int], max_length: int, truncation: Truncation) -> list[int]:
    """Return at most `max_length` ids of a prompt without images: without its start, its end or its middle.

    Raises:
        DataError: the prompt is longer and `truncation` is "error".
    """
    if len(ids) <= max_length:
        return list(ids)
    if truncation == "error":
        raise DataError(
            f"a prompt of {len(ids)} tokens, data.max_prompt_length is {max_length}; raise it, or set "
            "data.filter_overlong_prompts=True or data.truncation to left, right or middle"
        )
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
    return [*ids[:head], *ids[len(ids) - (max_length - head) :]]


@dataclass(frozen=True, slots=True)
class _Measured:
    length: int
    images: int
    data_source: str


def _measured(dataset: RowDataset, renderer: Renderer, workers: int, tools: Tools) -> Iterator[_Measured | DataError]:
    """Yield the size of every row in order, or what is wrong with it."""
    total = len(dataset)
    step = _ROWS_AT_ONCE * workers
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, total, step):
            stop = min(start + step, total)
            yield from pool.map(lambda index: _measure(dataset, renderer, tools, index), range(start, stop))


def _measure(dataset: RowDataset, renderer: Renderer, tools: Tools, index: int) -> _Measured | DataError:
    try:
        prompt = dataset[index]
    except DataError as error:
        return error
    try:
        schemas = () if prompt.env_name is None else tools.get(prompt.env_name, ())
        ids = renderer.expand(renderer.render(prompt.messages, schemas), prompt.images)
    except DataError as error:
        return DataError(f"{dataset.where(index)}: {error}")
    return _Measured(len(ids), len(prompt.images), prompt.data_source)


def _refuse(report: FilterReport, overlong: Overlong, bad_row: BadRow) -> None:
    first = "; ".join(report.examples)
    if report.kept == 0:
        raise DataError(
            f"no row is left: {report.summary()}. First: {first}. Raise data.max_prompt_length or repair the rows"
        )
    ways_out = []
    if report.overlong and overlong != "skip":
        ways_out.append("raise data.max_prompt_length or leave long rows out with data.filter_overlong_prompts=True")
    if report.broken and bad_row == "stop":
        ways_out.append("repair broken rows or leave them out with data.bad_row=skip")
    if ways_out:
        raise DataError(f"rows cannot be used: {report.summary()}. First: {first}. Way out: {'; '.join(ways_out)}")
