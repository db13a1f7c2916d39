"""From what a tool returned to the messages that a model reads: texts cut, images marked, nothing mistaken."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from vrl.agent.environments.types import Observation
from vrl.agent.tools.pictures import PictureError, as_png, fitted, open_picture
from vrl.agent.tools.types import ImageLimits, ToolAnswer
from vrl.protocol.trajectory import IMAGE_MARK

CUT_MARK: Final = "...(truncated)..."
_SPELLED_MARK: Final = "<image >"  # what a tool prints as `<image>` is no image


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TextLimit:
    """How much of a tool's text a model reads, in characters: what a token is, nothing in this package knows."""

    max_characters: int = 4096  # without the mark of the cut
    side: Literal["left", "right", "middle"] = "middle"  # which part is cut

    def cut(self, text: str) -> str:
        """Return the text, or what is left of it with a mark where something is missing."""
        if len(text) <= self.max_characters:
            return text
        head, tail = self._kept
        return f"{text[:head]}{CUT_MARK}{text[len(text) - tail :]}"

    def cut_around_images(self, text: str) -> str:
        """Return the same for a text with marks of images: these stay, each between what is left of its sides."""
        pieces = text.split(IMAGE_MARK)
        length = sum(map(len, pieces))
        if length <= self.max_characters:
            return text
        head, tail = self._kept
        kept: list[str] = []
        start, missing = 0, CUT_MARK
        for piece in pieces:
            left, right = piece[: max(head - start, 0)], piece[max(length - tail - start, 0) :]
            start += len(piece)
            if len(left) < len(piece) and start > head:  # the gap begins here; the mark of it stands once
                left, missing = left + missing, ""
            kept.append(left + right)
        return IMAGE_MARK.join(kept)

    @property
    def _kept(self) -> tuple[int, int]:
        """Characters that are kept at the beginning and at the end of a text that is cut."""
        return {
            "left": (0, self.max_characters),
            "right": (self.max_characters, 0),
            "middle": (self.max_characters - self.max_characters // 2, self.max_characters // 2),
        }[self.side]


def plain_text(text: str) -> str:
    """Return a tool's text with image marks spelled out made harmless."""
    return text.replace(IMAGE_MARK, _SPELLED_MARK)


@final
class ObservationBuilder:
    """Collects the answers to one turn as messages of one role, in order."""

    def __init__(self, role: str, text_limit: TextLimit, image_limits: ImageLimits) -> None:
        self._role = role
        self._text_limit = text_limit
        self._image_limits = image_limits
        self._messages: list[Mapping[str, Any]] = []
        self._images: list[bytes] = []

    def add(self, answer: ToolAnswer, **fields: Any) -> None:
        """Add one answer; `fields` go into its message. An image that a model cannot be shown becomes a note."""
        text = plain_text(self._text_limit.cut(answer.text))
        marks: list[str] = []
        images: list[bytes] = []
        for image in answer.images:
            try:
                images.append(self._shown(image))
            except PictureError as error:
                marks.append(f"({plain_text(str(error))})")
            else:
                marks.append(IMAGE_MARK)
        self._images += images
        content = "\n".join(part for part in (text, "".join(marks)) if part)
        self._messages.append({"role": self._role, **fields, "content": content})

    def _shown(self, data: bytes) -> bytes:
        """Return an image within the limits: as it came where it is, else as a new PNG."""
        image = open_picture(data)
        resized = fitted(image, self._image_limits)
        return data if resized is image else as_png(resized)

    def build(self) -> Observation:
        """Return the observation."""
        return Observation(messages=tuple(self._messages), images=tuple(self._images))


def count_marks(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return how many images the texts of messages ask for."""
    return sum(str(message["content"]).count(IMAGE_MARK) for message in messages)
