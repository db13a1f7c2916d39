"""Ragged rows to what a packed forward pass needs. The learner packs each micro-batch and passes it to a model."""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vrl.models.attention import AttentionPlans
from vrl.models.ulysses import SequenceGroup


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedBatch:
    """B rows behind one another in a sequence of T tokens, with all that keeps them apart.

    `position_ids` starts at 0 in each row. `mrope_positions` (time, height, width) is set for models with 3-D positions
    only. `pixel_values` and `image_grid_thw` hold the images of all rows in order; both are None when there are none.
    With `visual_index` they hold each distinct image once, and it says which visual token stands at each placeholder.
    Under sequence parallelism (`plans.sequence`) all of it is whole on every rank; the backbone slices.
    """

    input_ids: Int[Tensor, " T"]
    position_ids: Int[Tensor, " T"]
    mrope_positions: Int[Tensor, "T 3"] | None
    cu_seqlens: Int[Tensor, " B1"]
    max_length: int
    pixel_values: Float[Tensor, "P D"] | None
    image_grid_thw: Int[Tensor, "K 3"] | None
    visual_index: Int[Tensor, " N"] | None
    plans: AttentionPlans

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Return the batch on another device; pinned host memory is copied without waiting."""

        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, non_blocking=True)

        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            mrope_positions=move(self.mrope_positions),
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=True),
            pixel_values=move(self.pixel_values),
            image_grid_thw=move(self.image_grid_thw),
            visual_index=move(self.visual_index),
        )


def pack(
    input_ids: Int[Tensor, " T"],
    offsets: Int[Tensor, " B1"],
    *,
    positions: Int[Tensor, "T 3"] | None = None,
    pixel_values: Float[Tensor, "P D"] | None = None,
    image_grid_thw: Int[Tensor, "K 3"] | None = None,
    visual_index: Int[Tensor, " N"] | None = None,
    sequence: SequenceGroup | None = None,
) -> PackedBatch:
    """Pack flat rows. All tensors on the host; move the result with `.to(device)`.

    Args:
        input_ids: tokens of all rows, image placeholders expanded.
        offsets: row i is `input_ids[offsets[i]:offsets[i+1]]`.
        positions: 3-D positions, for models that have them; rows restart at 0.
        pixel_values: patches of all images in row order.
        image_grid_thw: time, height and width in patches of each image.
        visual_index: the visual token of each placeholder, where images that several rows have are given once.
        sequence: the ranks that share the tokens, each of which packs the same rows; None: this one alone.

    Raises:
        ValueError: no token, an empty row, or patches and grids that do not match.
    """
    lengths = offsets.diff()
    if len(input_ids) == 0 or int(lengths.min()) < 1:
        raise ValueError(
            f"cannot pack rows of lengths {lengths.tolist()}: there must be one, and each needs a token; "
            "a rank without rows runs a dummy row"
        )
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(input_ids):
        raise ValueError(
            f"offsets go from {int(offsets[0])} to {int(offsets[-1])}, but there are {len(input_ids)} tokens"
        )
    if (pixel_values is None) != (image_grid_thw is None):
        raise ValueError("pixel_values and image_grid_thw come together; one of them is missing")
    if image_grid_thw is not None and pixel_values is not None:
        expected = int(image_grid_thw.prod(dim=1).sum())
        if expected != len(pixel_values):
            raise ValueError(f"image_grid_thw stands for {expected} patches, but pixel_values has {len(pixel_values)}")
        if len(image_grid_thw) == 0:
            pixel_values = image_grid_thw = None
    row_starts = torch.repeat_interleave(offsets[:-1], lengths)
    return PackedBatch(
        input_ids=input_ids.to(torch.int64),
        position_ids=torch.arange(len(input_ids)) - row_starts,
        mrope_positions=None if positions is None else positions.to(torch.int64),
        cu_seqlens=offsets.to(torch.int32),
        max_length=int(lengths.max()),
        pixel_values=pixel_values,
        image_grid_thw=image_grid_thw,
        visual_index=visual_index,
        plans=AttentionPlans(lengths.tolist(), sequence),
    )
