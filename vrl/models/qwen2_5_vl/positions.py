"""Qwen2.5-VL's 3-D positions (M-RoPE, arXiv 2409.12191) of a finished row. The renderer calls it in rollout workers."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from vrl.protocol.errors import DataError


def mrope_positions(
    ids: Sequence[int],
    grids: Sequence[tuple[int, int, int]],
    *,
    image_token_id: int,
    merge_size: int = 2,
) -> Int[Tensor, "T 3"]:
    """Return time, height and width positions of one row.

    Text counts on in all three. An image keeps its time position and counts rows and columns of its visual tokens from
    where it starts; what follows goes on behind its longer side. Only image tokens tell where images are: a
    vision-start token that opens none is text.

    Args:
        ids: the row, image placeholders expanded.
        grids: time, height and width in patches of its images, in order.
        image_token_id: the placeholder.
        merge_size: patches a side that make one visual token.

    Raises:
        DataError: the runs of image tokens do not match the grids.
    """
    is_image = torch.as_tensor(ids, dtype=torch.int64) == image_token_id
    positions = torch.empty(len(ids), 3, dtype=torch.int64)
    done = following = 0
    for number, (frames, height, width) in enumerate(grids):
        rows, columns = height // merge_size, width // merge_size
        size = frames * rows * columns
        ahead = is_image[done:].nonzero()
        start = done + int(ahead[0]) if len(ahead) else len(ids)
        if start + size > len(ids) or not bool(is_image[start : start + size].all()):
            raise DataError(f"image {number} makes {size} visual tokens, but the row has fewer image tokens at {start}")
        positions[done:start] = (torch.arange(start - done) + following)[:, None]
        following += start - done
        grid = torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(columns))
        positions[start : start + size] = grid.view(-1, 3) + following
        following += max(rows, columns)
        done = start + size
    if bool(is_image[done:].any()):
        raise DataError(f"the row has {int(is_image[done:].sum())} image tokens more than its {len(grids)} images make")
    positions[done:] = (torch.arange(len(ids) - done) + following)[:, None]
    return positions
