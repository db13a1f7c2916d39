"""Ragged rows to what a packed forward pass needs. The learner packs each micro-batch and passes it to a model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vrl.models.attention import AttentionPlans
from vrl.models.shared_prompts import Layout, lay_out
from vrl.models.ulysses import SequenceGroup
from vrl.protocol.balance import RowPrompt


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedBatch:
    """B rows behind one another in a sequence of T tokens, with all that keeps them apart.

    `position_ids` starts at 0 in each row. `mrope_positions` (time, height, width) is set for models with 3-D positions
    only. `pixel_values` and `image_grid_thw` hold the images of all rows in order; both are None when there are none.
    With `visual_index` they hold each distinct image once, and it says which visual token stands at each placeholder.
    Under sequence parallelism (`plans.sequence`) all of it is whole on every rank; the backbone slices.
    With `compact` (see `with_shared_prompts`) the backbone runs on its tokens, and only its batch has the images.
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
    compact: "Compact | None" = None

    @property
    def computed(self) -> "PackedBatch":
        """Return the batch whose tokens the backbone runs on: this one, or the compact one."""
        return self if self.compact is None else self.compact.batch

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
            plans=self.plans.to(device),
            compact=None if self.compact is None else self.compact.to(device),
        )


@final
@dataclass(frozen=True, slots=True, eq=False)
class Compact:
    """The U tokens that are computed for T row tokens: `place[t]` is the one that stands for row token t.

    In `batch` a row is a segment of `shared_prompts.Layout`: its positions go on from those of its prompt.
    """

    batch: PackedBatch
    place: Int[Tensor, " T"]

    def to(self, device: torch.device | str) -> "Compact":
        """Return it on another device."""
        return Compact(self.batch.to(device), self.place.to(device, non_blocking=True))


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


def with_shared_prompts(rows: PackedBatch, prompts: Sequence[RowPrompt], image_token: int | None) -> PackedBatch:
    """Return the rows so that a prompt that several begin with is computed once. On the host, before `.to(device)`.

    Args:
        rows: as `pack` returns them.
        prompts: how each row begins.
        image_token: the placeholder of images; None for text models.
    """
    layout = lay_out(rows.cu_seqlens.tolist(), prompts)
    if layout is None:
        return rows
    compact = Compact(_compacted(rows, layout, image_token), layout.place)
    return replace(rows, pixel_values=None, image_grid_thw=None, visual_index=None, compact=compact)


def _compacted(rows: PackedBatch, layout: Layout, image_token: int | None) -> PackedBatch:
    kept = layout.kept
    return replace(
        rows,
        input_ids=rows.input_ids[kept],
        position_ids=rows.position_ids[kept],
        mrope_positions=None if rows.mrope_positions is None else rows.mrope_positions[kept],
        cu_seqlens=torch.tensor([0, *layout.lengths]).cumsum(0).to(torch.int32),
        max_length=max(layout.lengths),
        visual_index=_visual_index(rows, kept, image_token),
        plans=AttentionPlans(layout.lengths, rows.plans.sequence, key_lengths=layout.key_lengths, keys=layout.keys),
    )


def _visual_index(rows: PackedBatch, kept: Int[Tensor, " U"], image_token: int | None) -> Int[Tensor, " N"] | None:
    """Return the visual token of each placeholder among the tokens that are kept."""
    if rows.image_grid_thw is None:
        return None
    is_image = rows.input_ids == image_token
    visual = torch.zeros_like(rows.input_ids)
    visual[is_image] = torch.arange(int(is_image.sum())) if rows.visual_index is None else rows.visual_index
    return visual[kept][is_image[kept]]
