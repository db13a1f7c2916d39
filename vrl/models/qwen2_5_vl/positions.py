"""Qwen2.5-VL's 3-D positions (M-RoPE, arXiv 2409.12191) of a finished row. The renderer calls it in rollout workers."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from vrl.protocol.errors import DataError


def mrope_positions(
    ids: Sequence[int],
    grids: Sequence[tuple[int, int, int]],
    *,
    image_token_id: int,
    merge_size: int = 2,
) -> Int[np.ndarray, "T 3"]:
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
    is_image = np.asarray(ids, dtype=np.int64) == image_token_id
    places = np.flatnonzero(is_image)
    positions = np.empty((len(ids), 3), dtype=np.int64)
    done = following = 0
    for number, (frames, height, width) in enumerate(grids):
        rows, columns = height // merge_size, width // merge_size
        size = frames * rows * columns
        first = np.searchsorted(places, done)
        start = int(places[first]) if first < len(places) else len(ids)
        if start + size > len(ids) or not bool(is_image[start : start + size].all()):
            raise DataError(f"image {number} makes {size} visual tokens, but the row has fewer image tokens at {start}")
        positions[done:start] = (np.arange(start - done) + following)[:, None]
        following += start - done
        grid = np.indices((frames, rows, columns)).reshape(3, -1).T
        positions[start : start + size] = grid + following
        following += max(rows, columns)
        done = start + size
    if bool(is_image[done:].any()):
        raise DataError(f"the row has {int(is_image[done:].sum())} image tokens more than its {len(grids)} images make")
    positions[done:] = (np.arange(len(ids) - done) + following)[:, None]
    return positions
