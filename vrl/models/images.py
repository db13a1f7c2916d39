"""Images from bytes to patches: one decoder, one resize rule, one bounded cache, for engine and learner alike.

The renderer counts visual tokens with `ImageRule`; processes that run a model take patches from an `ImageCache`.
"""

import io
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from jaxtyping import Float, Int
from PIL import Image, ImageOps
from torch import Tensor
from transformers import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from vrl.protocol.errors import DataError
from vrl.protocol.trajectory import content_key

MAX_ASPECT_RATIO: Final = 200
_DECODE_ERRORS: Final = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRule:
    """How an image's size becomes a grid of patches: pixel limits and sides, in pixels and patches."""

    min_pixels: int
    max_pixels: int
    patch_size: int = 14
    merge_size: int = 2

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Return time, height and width in patches after the resize.

        Raises:
            DataError: no pixels, or one side more than 200 times the other.
        """
        if min(height, width) < 1:
            raise DataError(f"the image has no pixels ({height} x {width})")
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise DataError(f"the image is {height} x {width}: one side is over {MAX_ASPECT_RATIO} times the other")
        factor = self.patch_size * self.merge_size
        resized = smart_resize(height, width, factor, self.min_pixels, self.max_pixels)
        return 1, resized[0] // self.patch_size, resized[1] // self.patch_size

    def tokens(self, grid: tuple[int, int, int]) -> int:
        """Return how many visual tokens a grid makes."""
        return grid[0] * grid[1] * grid[2] // self.merge_size**2


def rule_of(processor: Qwen2VLImageProcessor) -> ImageRule:
    """Return the rule that a loaded Qwen2-VL image processor follows."""
    size: Any = processor.size
    return ImageRule(
        min_pixels=size["shortest_edge"],
        max_pixels=size["longest_edge"],
        patch_size=processor.patch_size,
        merge_size=processor.merge_size,
    )


def decode_image(data: bytes) -> Image.Image:
    """Return the image as RGB, upright (EXIF), on white where it is transparent.

    Raises:
        DataError: the bytes are no readable image.
    """
    try:
        with Image.open(io.BytesIO(data)) as opened:
            opened.load()
            image = ImageOps.exif_transpose(opened)
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return image.convert("RGB")
    except _DECODE_ERRORS as error:
        raise DataError(f"an image of {len(data)} bytes cannot be read: {error}") from error


def image_size(data: bytes) -> tuple[int, int]:
    """Return the two sides of an encoded image in pixels, as its header says.

    Raises:
        DataError: the bytes are no image.
    """
    try:
        with Image.open(io.BytesIO(data)) as opened:
            return opened.height, opened.width
    except _DECODE_ERRORS as error:
        raise DataError(f"an image of {len(data)} bytes cannot be read: {error}") from error


@final
class ImageCache:
    """Patches of images, least recently used ones dropped beyond a number of bytes. One a process; shared tensors."""

    def __init__(self, processor: Qwen2VLImageProcessor, max_bytes: int) -> None:
        self._processor = processor
        self._rule = rule_of(processor)
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, ImageRule], tuple[Tensor, Tensor]] = OrderedDict()
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the patches held."""
        return self._bytes

    def clear(self) -> None:
        """Drop all patches."""
        self._entries.clear()
        self._bytes = 0

    def get(self, data: bytes) -> tuple[Float[Tensor, "P D"], Int[Tensor, "1 3"]]:
        """Return patches and grid of an encoded image; read them only.

        Raises:
            DataError: the image cannot be used.
        """
        key = (content_key(data), self._rule)
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
            return found
        image = decode_image(data)
        self._rule.grid(image.height, image.width)
        features = self._processor(images=[image], return_tensors="pt")
        entry = (features["pixel_values"], features["image_grid_thw"])
        size = entry[0].nbytes
        if size <= self._max_bytes:
            self._entries[key] = entry
            self._bytes += size
            while self._bytes > self._max_bytes:
                _, (dropped, _) = self._entries.popitem(last=False)
                self._bytes -= dropped.nbytes
        return entry

    def distinct(
        self, images: Sequence[bytes]
    ) -> tuple[Float[Tensor, "P D"], Int[Tensor, "K 3"], Int[Tensor, " N"]] | tuple[None, None, None]:
        """Return patches and grids of each distinct image, and for each visual token of `images` in order its place
        among theirs: the samples of a prompt share its images, and the vision tower runs once for all.
        """
        if not images:
            return None, None, None
        parts = {data: self.get(data) for data in images}
        grids = torch.cat([grid for _, grid in parts.values()])
        counts = (grids.prod(dim=1) // self._rule.merge_size**2).tolist()
        tokens = dict(zip(parts, torch.arange(sum(counts)).split(counts), strict=True))
        index = torch.cat([tokens[data] for data in images])
        return torch.cat([patches for patches, _ in parts.values()]), grids, index

    def batch(self, images: Sequence[bytes]) -> tuple[Float[Tensor, "P D"], Int[Tensor, "K 3"]] | tuple[None, None]:
        """Return patches and grids of many images in order, or (None, None) of none: what `pack` takes."""
        if not images:
            return None, None
        parts = [self.get(data) for data in images]
        return torch.cat([patches for patches, _ in parts]), torch.cat([grid for _, grid in parts])
