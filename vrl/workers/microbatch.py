"""Rows of a batch to one packed model input; and the row a rank runs when it holds none."""

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vrl.models.images import ImageCache
from vrl.models.packing import PackedBatch, pack, with_shared_prompts
from vrl.models.ulysses import SequenceGroup
from vrl.protocol.balance import RowPrompt
from vrl.protocol.columns import COLUMNS, IMAGE_KEYS, INPUT_IDS, LOSS_MASK, POSITION_IDS
from vrl.protocol.dataproto import DataProto, object_column
from vrl.protocol.ragged import Ragged

_DUMMY_LENGTH = 4


class Packer:
    """Packs rows for one model: ids, positions and the pixels of their images (decoded once, cached)."""

    def __init__(
        self,
        images: ImageCache | None,
        needs_positions: bool,
        sequence: SequenceGroup | None = None,
        *,
        share_prompts: bool = False,
        image_token: int | None = None,
    ) -> None:
        self._images = images
        self._sequence = sequence
        self._image_token = image_token
        self.share_prompts = share_prompts
        self.needs_positions = needs_positions

    def pack(self, rows: DataProto, device: torch.device) -> PackedBatch:
        """Return the rows one after the other as one sequence, with their images, on `device`."""
        ids = rows.ragged(INPUT_IDS)
        positions = rows.ragged(POSITION_IDS).values if self.needs_positions else None
        pixels, grids, index = self._pixels(rows)
        packed = pack(
            ids.values,
            ids.offsets,
            positions=positions,
            pixel_values=pixels,
            image_grid_thw=grids,
            visual_index=index,
            sequence=self._sequence,
        )
        if self.share_prompts:
            packed = with_shared_prompts(packed, self.prompts(rows), self._image_token)
        return packed.to(device)

    def prompts(self, rows: DataProto) -> list[RowPrompt]:
        """Return how each row begins: what stands before its first sampled token. No word of a group is taken for it.

        Rows of equal numbers have the same ids, positions and images there.
        """
        ids, masks = rows.ragged(INPUT_IDS), rows.ragged(LOSS_MASK)
        places = rows.ragged(POSITION_IDS).values.numpy() if self.needs_positions else None
        numbers: dict[tuple[object, ...], int] = {}
        prompts: list[RowPrompt] = []
        for row, (begin, end) in enumerate(pairwise(ids.offsets.tolist())):
            mask = masks.values[begin:end].numpy()
            length = int(mask.argmax()) if mask.any() else end - begin
            shown = ids.values[begin : begin + length].numpy()
            where = b"" if places is None else places[begin : begin + length].tobytes()
            images = self._images_before(rows, row, ids.values[begin:end].numpy(), length)
            key = (shown.tobytes(), where, images)
            prompts.append(RowPrompt(numbers.setdefault(key, len(numbers)), length))
        return prompts

    def _images_before(self, rows: DataProto, row: int, ids: NDArray[np.int64], length: int) -> tuple[str, ...]:
        """Return the images among the first tokens of a row: each is a run of placeholders.

        Where it is not, because nothing stands between two of them, all images of the row count.
        """
        if self._images is None or IMAGE_KEYS not in rows:
            return ()
        is_image = ids == self._image_token
        begins = np.flatnonzero(is_image & ~np.concatenate([[False], is_image[:-1]]))
        keys: tuple[str, ...] = rows.objects[IMAGE_KEYS][row]
        return keys[: int((begins < length).sum())] if len(begins) == len(keys) else keys

    def _pixels(self, rows: DataProto) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self._images is None or IMAGE_KEYS not in rows:
            return None, None, None
        return self._images.distinct([rows.blobs[key] for row in rows.objects[IMAGE_KEYS] for key in row])


def dummy_batch(like: DataProto, needs_positions: bool) -> DataProto:
    """Return one row with the columns of `like`, all zero but one sampled token. Its loss is multiplied by zero."""
    offsets = torch.tensor([0, _DUMMY_LENGTH])
    columns: dict[str, Tensor | Ragged] = {}
    for name in {*like.columns, INPUT_IDS, LOSS_MASK, *([POSITION_IDS] if needs_positions else [])}:
        spec = COLUMNS[name]
        dtype = getattr(torch, spec.dtype)
        if name == POSITION_IDS:
            columns[name] = Ragged(torch.arange(_DUMMY_LENGTH)[:, None].expand(-1, 3), offsets)
        elif spec.shape == "T":
            columns[name] = Ragged(torch.zeros(_DUMMY_LENGTH, dtype=dtype), offsets)
        elif spec.shape == "B":
            columns[name] = torch.zeros(1, dtype=dtype)
    mask = torch.zeros(_DUMMY_LENGTH, dtype=torch.bool)
    mask[-1] = True
    columns[LOSS_MASK] = Ragged(mask, offsets)
    return DataProto(columns, {IMAGE_KEYS: object_column([()])})
