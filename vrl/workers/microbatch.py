"""Rows of a batch to one packed model input; and the row a rank runs when it holds none."""

import torch
from torch import Tensor

from vrl.models.images import ImageCache
from vrl.models.packing import PackedBatch, pack
from vrl.models.ulysses import SequenceGroup
from vrl.protocol.columns import COLUMNS, IMAGE_KEYS, INPUT_IDS, LOSS_MASK, POSITION_IDS
from vrl.protocol.dataproto import DataProto, object_column
from vrl.protocol.ragged import Ragged

_DUMMY_LENGTH = 4


class Packer:
    """Packs rows for one model: ids, positions and the pixels of their images (decoded once, cached)."""

    def __init__(self, images: ImageCache | None, needs_positions: bool, sequence: SequenceGroup | None = None) -> None:
        self._images = images
        self._sequence = sequence
        self.needs_positions = needs_positions

    def pack(self, rows: DataProto, device: torch.device) -> PackedBatch:
        """Return the rows one after the other as one sequence, with their images, on `device`."""
        ids = rows.ragged(INPUT_IDS)
        positions = rows.ragged(POSITION_IDS).values if self.needs_positions else None
        pixels, grids, index = self._pixels(rows)
        return pack(
            ids.values,
            ids.offsets,
            positions=positions,
            pixel_values=pixels,
            image_grid_thw=grids,
            visual_index=index,
            sequence=self._sequence,
        ).to(device)

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
