"""What changes scores or takes rows out of the loss before advantages are computed. Called by the trainer on a batch.

`lengths` are counted by the caller (`segments.row_counts` counts sampled tokens). Nothing here writes into its inputs.
"""

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from vrl.algorithms import segments
from vrl.algorithms.segments import Groups


def overlong_penalty(
    lengths: Int64[Tensor, " B"], max_length: int, buffer: int, penalty_factor: float
) -> Float[Tensor, " B"]:
    """Soft overlong punishment (DAPO, arXiv 2503.14476), to be added to the scores; float32, never positive.

    0 up to max_length - buffer tokens, from there linear down to -penalty_factor at max_length, and no lower beyond
    it (verl's goes on falling). Raises ValueError for a buffer outside 1 .. max_length and a negative factor.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(
            f"overlong_buffer.len must lie between 1 and max_resp_len={max_length}, got {buffer}; "
            "set overlong_buffer.enable=False for no penalty"
        )
    if penalty_factor < 0:
        raise ValueError(f"overlong_buffer.penalty_factor must not be negative, got {penalty_factor}")
    excess = (lengths - (max_length - buffer)).clamp(0, buffer)
    return -(excess.float() / buffer * penalty_factor)


def clip_rewards(rewards: Float[Tensor, " N"], low: float, high: float) -> Float[Tensor, " N"]:
    """Rewards (of rows or tokens) held within low and high; NaN stays. ValueError unless low < high."""
    if not low < high:
        raise ValueError(f"rewards are clipped to a range whose lower end is below the upper one, got {low} and {high}")
    return rewards.clamp(low, high)


def zero_variance_rows(scores: Float[Tensor, " B"], group: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """True for the rows of groups of two or more whose scores are all equal: group baselines give them advantage 0.

    Equal means equal, not a standard deviation near 0: seven times 0.7 is such a group. A group of one is none (its
    score is its advantage), and neither is a group with a NaN.
    """
    groups = Groups.of(group)
    equal = (groups.min(scores) == groups.max(scores)) & (groups.sizes > 1)
    return equal[groups.index]


def mask_rows(mask: Bool[Tensor, " T"], rows: Bool[Tensor, " B"], offsets: Int64[Tensor, " B+1"]) -> Bool[Tensor, " T"]:
    """The loss mask without the rows where `rows` is true.

    With rows that were cut at the length limit this is DAPO's overlong filtering (arXiv 2503.14476): they
    train nothing, and their scores still count in the statistics of their group. With `zero_variance_rows` it is the
    zero-variance filter: such groups neither train nor count in the means of the loss. Aggregation counts what is left.
    """
    return mask & ~segments.spread(rows.float(), offsets, mask.numel()).bool()
