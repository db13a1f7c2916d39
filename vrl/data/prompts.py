"""One row of a data file to a `Prompt`: messages, images, ground truth, environment. Called by `dataset`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vrl.data.images import image_cells, is_missing, read_image
from vrl.protocol.errors import DataError
from vrl.protocol.trajectory import IMAGE_MARK, Prompt

_UNSUPPORTED: Final = ("videos", "audios")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnNames:
    """The columns whose names a run may set (`data.prompt_key`, `data.image_key`, `data.reward_fn_key`)."""

    prompt: str = "prompt"
    image: str = "images"
    data_source: str = "data_source"


def to_prompt(row: Mapping[str, Any], names: ColumnNames, folder: Path, row_id: str) -> Prompt:
    """Return the prompt of a row in verl's format. Columns without a meaning of their own go into `extra_info`.

    Raises:
        DataError: the messages or an image cannot be read, or `<image>` marks and images differ in number.
    """
    messages = _messages(row.get(names.prompt), names.prompt)
    images = tuple(read_image(cell, folder) for cell in image_cells(row.get(names.image)))
    marks = sum(message["content"].count(IMAGE_MARK) for message in messages if message["role"] != "assistant")
    if marks != len(images):
        raise DataError(f"{marks} {IMAGE_MARK} marks in '{names.prompt}', but {len(images)} images in '{names.image}'")
    for name in _UNSUPPORTED:
        if not is_missing(row.get(name)):
            raise DataError(f"column '{name}' is not empty; vrl reads text and images, drop these rows or the column")
    reward_model = _mapping(row.get("reward_model"), "reward_model")
    extra_info = _mapping(row.get("extra_info"), "extra_info")
    return Prompt(
        row_id=row_id,
        uid=row_id,
        messages=messages,
        images=images,
        data_source=data_source_of(row.get(names.data_source)),
        ground_truth=reward_model.get("ground_truth"),
        extra_info=_other_columns(row, names, reward_model) | extra_info,
        env_name=env_name_of(row.get("env_name")),
        tools_kwargs=_tools_kwargs(row.get("tools_kwargs"), extra_info.get("tools_kwargs")),
    )


def env_name_of(cell: Any) -> str | None:
    """Return the environment a row names; None, NaN and empty text mean a plain single-turn row."""
    return None if is_missing(cell) else str(cell)


def data_source_of(cell: Any) -> str:
    """Return what chooses the reward of a row; "unknown" for None, NaN and empty text."""
    return "unknown" if is_missing(cell) else str(cell)


def _other_columns(row: Mapping[str, Any], names: ColumnNames, reward_model: Mapping[str, Any]) -> dict[str, Any]:
    read = {names.prompt, names.image, names.data_source, "reward_model", "extra_info", "env_name", "tools_kwargs"}
    others = {name: value for name, value in row.items() if name not in read and name not in _UNSUPPORTED}
    reward = {key: value for key, value in reward_model.items() if key != "ground_truth"}
    return others | {"reward_model": reward} if reward else others


def _tools_kwargs(column: Any, in_extra_info: Any) -> dict[str, Any]:
    """Parquet gives every row the keys of all rows, None where a row had none: those are left out, at every depth."""
    given = in_extra_info if is_missing(column) else column
    return _without_none(_mapping(given, "tools_kwargs"))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def _mapping(cell: Any, column: str) -> dict[str, Any]:
    if is_missing(cell):
        return {}
    if not isinstance(cell, Mapping):
        raise DataError(f"column '{column}' holds {type(cell).__name__}; it must hold a dict")
    return dict(cell)


def _messages(cell: Any, column: str) -> list[dict[str, Any]]:
    if isinstance(cell, str) and cell:
        return [{"role": "user", "content": cell}]
    if is_missing(cell) or not isinstance(cell, Sequence):
        raise DataError(
            f"column '{column}' holds {cell!r:.80}; it must hold messages, [{{'role': ..., 'content': ...}}]"
        )
    return [_message(item, column) for item in cell]


def _message(item: Any, column: str) -> dict[str, Any]:
    if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
        raise DataError(f"column '{column}' holds the message {item!r:.80}; it must have 'role' and 'content'")
    content = item.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, column) for part in content)
    if not isinstance(content, str):
        raise DataError(f"column '{column}': the content of a message is {type(content).__name__}; it must be text")
    return {key: value for key, value in item.items() if value is not None} | {"content": content}


def _part(part: Any, column: str) -> str:
    """Return the text of one typed part; an image part is a mark for the next image of the image column."""
    if isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type") == "text":
        return part["text"]
    if isinstance(part, Mapping) and part.get("type") == "image" and is_missing(part.get("image")):
        return IMAGE_MARK
    raise DataError(
        f"column '{column}' holds the part {part!r:.80}; parts are {{'type': 'text', 'text': ...}} or "
        "{'type': 'image'}, the images themselves belong into the image column"
    )
