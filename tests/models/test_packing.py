"""Packing of flat rows."""

import pytest
import torch

from vrl.models.attention import Run
from vrl.models.packing import pack


def test_positions_restart_in_each_row() -> None:
    packed = pack(torch.arange(6), torch.tensor([0, 2, 3, 6]))
    assert packed.position_ids.tolist() == [0, 1, 0, 0, 1, 2]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.tolist() == [0, 2, 3, 6]
    assert packed.max_length == 3
    assert packed.plans.runs == (Run(1, 2, 2), Run(1, 1, 1), Run(1, 3, 3))
    assert packed.pixel_values is None


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ([], [0], "there must be one"),
        ([1, 2], [0, 2, 2], "each needs a token"),
        ([1, 2, 3], [0, 2], "offsets go from 0 to 2"),
        ([1, 2, 3], [1, 3], "offsets go from 1 to 3"),
    ],
)
def test_impossible_rows_are_refused(ids: list[int], offsets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(torch.tensor(ids, dtype=torch.int64), torch.tensor(offsets))


def test_patches_must_match_their_grids() -> None:
    ids, offsets = torch.arange(4), torch.tensor([0, 4])
    grids = torch.tensor([[1, 2, 2], [1, 2, 4]])
    with pytest.raises(ValueError, match="12 patches, but pixel_values has 4"):
        pack(ids, offsets, pixel_values=torch.zeros(4, 8), image_grid_thw=grids)
    with pytest.raises(ValueError, match="come together"):
        pack(ids, offsets, image_grid_thw=grids)
    assert pack(ids, offsets, pixel_values=torch.zeros(12, 8), image_grid_thw=grids).image_grid_thw is grids


def test_no_images_in_tensors_of_length_zero_is_no_images() -> None:
    empty = torch.zeros(0, 3, dtype=torch.int64)
    packed = pack(torch.arange(4), torch.tensor([0, 4]), pixel_values=torch.zeros(0, 8), image_grid_thw=empty)
    assert packed.pixel_values is None
    assert packed.image_grid_thw is None
