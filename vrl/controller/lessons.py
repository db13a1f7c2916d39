"""What supervised training learns of rows: the answer to a prompt, or a teacher's turns among those of tools."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from vrl.controller.playback import Playback
from vrl.models.renderer import HFRenderer
from vrl.protocol.columns import IMAGE_KEYS, INPUT_IDS, LOSS_MASK, MINI_BATCH, POSITION_IDS
from vrl.protocol.config.schema import Config
from vrl.protocol.dataproto import DataProto, object_column
from vrl.protocol.errors import DataError
from vrl.protocol.ragged import Ragged
from vrl.protocol.trajectory import Prompt, Trajectory, content_key


@final
@dataclass(frozen=True, slots=True)
class _Lesson:
    """One row: ids, where they are learned, and the images of the whole row."""

    ids: Sequence[int]
    mask: Sequence[int]
    images: Sequence[bytes]


@final
class Lessons:
    """Makes batches. Rows with an environment are played when they are first asked for; see `playback`."""

    def __init__(self, config: Config, renderer: HFRenderer) -> None:
        self._renderer = renderer
        self._key = config.warm_start.messages_key
        self._playback = Playback(config, renderer)

    def close(self) -> None:
        """End the tool processes."""
        self._playback.close()

    def batch(self, prompts: Sequence[Prompt]) -> DataProto:
        """Return one mini-batch, with `loss_mask` on what the assistant says and the tokens that end its turns.

        Raises DataError for a row without an answer or that cannot be played.
        """
        acting = [prompt for prompt in prompts if prompt.env_name is not None]
        played = self._playback.rows(acting, lambda prompt: assistant_turns(prompt, self._key))
        lessons = [self._lesson(prompt, played.get(prompt.row_id)) for prompt in prompts]
        columns: dict[str, torch.Tensor | Ragged] = {
            INPUT_IDS: Ragged.from_rows([lesson.ids for lesson in lessons], torch.int64),
            LOSS_MASK: Ragged.from_rows([lesson.mask for lesson in lessons], torch.bool),
            MINI_BATCH: torch.zeros(len(prompts), 1, dtype=torch.int64),
        }
        positions = [self._renderer.positions(lesson.ids, lesson.images) for lesson in lessons]
        if all(position is not None for position in positions):
            flat = torch.cat([torch.as_tensor(position, dtype=torch.int64) for position in positions])
            columns[POSITION_IDS] = Ragged(flat, columns[INPUT_IDS].offsets)  # type: ignore[union-attr]
        keys = object_column(tuple(content_key(image) for image in lesson.images) for lesson in lessons)
        blobs = {content_key(image): image for lesson in lessons for image in lesson.images}
        return DataProto(columns, {IMAGE_KEYS: keys}, blobs)

    def _lesson(self, prompt: Prompt, played: Trajectory | None) -> _Lesson:
        if played is not None:
            return _Lesson(played.input_ids, played.loss_mask, played.images)
        before = self._renderer.expand(self._renderer.render(prompt.messages), prompt.images)
        answer = self._renderer.answer_ids(assistant_turns(prompt, self._key)[-1])
        return _Lesson([*before, *answer], [0] * len(before) + [1] * len(answer), prompt.images)


def assistant_turns(prompt: Prompt, key: str) -> list[str]:
    """Return what the assistant says in column `key`: an answer, or a conversation's messages of the assistant.

    Raises DataError, naming the row, when there is nothing.
    """
    value: Any = prompt.extra_info.get(key)
    turns: list[Any] = [value]
    if isinstance(value, list):
        said = [message.get("content") for message in value if isinstance(message, dict)]
        roles = [message.get("role") for message in value if isinstance(message, dict)]
        turns = [text for text, role in zip(said, roles, strict=True) if role == "assistant"] or said[-1:]
    if not turns or not all(isinstance(text, str) and text for text in turns):
        raise DataError(
            f"row {prompt.row_id}: no answer to learn in column {key!r}; set warm_start.messages_key to the "
            "column with it"
        )
    return turns
