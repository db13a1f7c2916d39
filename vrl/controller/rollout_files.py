"""Rollouts and evaluations for people to read: `step_N.jsonl`, an object a row, images beside. The trainer calls it."""

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np

from vrl.controller.data_metrics import row_sums
from vrl.protocol.columns import (
    DATA_SOURCE,
    GROUND_TRUTH,
    IMAGE_KEYS,
    INPUT_IDS,
    LOSS_MASK,
    PROMPT_LENGTH,
    PROMPT_TEXT,
    RESPONSE_TEXT,
    ROW_ID,
    SAMPLE_INDEX,
    SCORE_EXTRA,
    STOP_REASON,
    TOKEN_LEVEL_SCORES,
    TURN_INFO,
    TURN_REWARDS,
    UID,
)
from vrl.protocol.dataproto import DataProto

# An image in a rendered prompt: the placeholders of its visual tokens, and the marks round them.
_IMAGE = re.compile(r"(?:<\|vision_start\|>)?(?:<\|(?:image|video)_pad\|>)+(?:<\|vision_end\|>)?")
_SIGNATURES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
_IMAGES = "images"


class StepRows(Protocol):
    """The rows of a step: those that count, and those whose episode failed outside the model."""

    @property
    def rows(self) -> DataProto:
        """What is trained on or evaluated."""
        ...

    @property
    def failed(self) -> DataProto:
        """What has no score."""
        ...


@final
class RolloutFiles:
    """Writes below `folder`. `max_rows` bounds the rows of a file, None writes all; up to half of them are failures."""

    def __init__(self, folder: Path, max_rows: int | None = None) -> None:
        self._folder = folder
        self._max_rows = max_rows
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-files")
        self._last: Future[Path] | None = None

    def write_beside(self, generated: StepRows, step: int) -> None:
        """Write the rows while the caller goes on. What goes wrong is raised by the next call, or by `finish`."""
        self.finish()
        self._last = self._writer.submit(self.write, generated, step)

    def finish(self) -> None:
        """Wait for the file that is being written."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def write(self, generated: StepRows, step: int) -> Path:
        """Write the rows of a step, and those of their images that are not there yet; return the file."""
        failed, rows = generated.failed, generated.rows
        if self._max_rows is not None:
            failed = failed[: self._max_rows // 2]
            rows = rows[: self._max_rows - len(failed)]
        (self._folder / _IMAGES).mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step_{step}.jsonl"
        part = path.with_name(f"{path.name}.tmp")
        with part.open("w", encoding="utf-8") as file:
            for row in (*self._objects(rows, step, scored=True), *self._objects(failed, step, scored=False)):
                file.write(_line(row))
        part.replace(path)
        return path

    def _objects(self, batch: DataProto, step: int, scored: bool) -> Iterator[dict[str, Any]]:
        if not len(batch):
            return
        names = {key: self._image(key, data) for key, data in batch.blobs.items()}
        scores = row_sums(batch, TOKEN_LEVEL_SCORES).tolist()
        lengths = batch.ragged(INPUT_IDS).lengths.tolist()
        sampled = [int(row.sum()) for row in batch.ragged(LOSS_MASK).to_rows()]
        prompts = batch.dense(PROMPT_LENGTH).tolist()
        samples = batch.dense(SAMPLE_INDEX).tolist()
        cells = batch.objects
        for i in range(len(batch)):
            yield {
                "step": step,
                "uid": cells[UID][i],
                "row_id": cells[ROW_ID][i],
                "sample_index": samples[i],
                "data_source": cells[DATA_SOURCE][i],
                "prompt_text": _IMAGE.sub("<image>", cells[PROMPT_TEXT][i]),
                "response_text": _IMAGE.sub("<image>", cells[RESPONSE_TEXT][i]),
                "ground_truth": cells[GROUND_TRUTH][i],
                "score": scores[i] if scored else None,
                "score_extra": cells[SCORE_EXTRA][i],
                "turn_rewards": cells[TURN_REWARDS][i],
                "turn_info": cells[TURN_INFO][i],
                "stop_reason": cells[STOP_REASON][i],
                "prompt_length": prompts[i],
                "response_length": lengths[i] - prompts[i],
                "sampled_tokens": sampled[i],
                "images": [names[key] for key in cells[IMAGE_KEYS][i]],
            }

    def _image(self, key: str, data: bytes) -> str:
        """Write an image once; return its path relative to the file of the rows."""
        kind = next((kind for start, kind in _SIGNATURES.items() if data.startswith(start)), "bin")
        name = f"{_IMAGES}/{key}.{kind}"
        path = self._folder / name
        if not path.exists() or path.stat().st_size != len(data):  # a kill may have left half of it
            path.write_bytes(data)
        return name


def _line(row: dict[str, Any]) -> str:
    """Return a row as one line of JSON. What a model or a reward wrote is kept as far as JSON and UTF-8 have it."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:  # NaN and infinity are null
        plain = json.loads(json.dumps(row, default=_plain), parse_constant=lambda _: None)
        text = json.dumps(plain, ensure_ascii=False)
    return text.encode(errors="replace").decode() + "\n"


def _plain(value: Any) -> Any:
    """Return what JSON can hold of a value that it cannot."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)
