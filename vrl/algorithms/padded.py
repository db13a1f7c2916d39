"""Between padded `[B, L]` and flat ragged tensors. Only tests and benchmarks call this: nothing in vrl is padded."""

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor


def from_padded(x: Shaped[Tensor, "B L"]) -> tuple[Shaped[Tensor, " T"], Int64[Tensor, " B1"]]:
    """Flat tensor and offsets; every row keeps all L columns, so that what stands on masked columns stays inside."""
    rows, width = x.shape
    return x.reshape(-1), torch.arange(rows + 1, device=x.device) * width


def to_padded(x: Float[Tensor, " T"], offsets: Int64[Tensor, " B1"], fill: float = 0.0) -> Float[Tensor, "B L"]:
    """Rows on the left of a `[B, L]` tensor as wide as the longest row, `fill` behind them."""
    lengths = offsets.diff()
    width = int(lengths.max()) if lengths.numel() else 0
    filled = torch.arange(width, device=x.device) < lengths[:, None]
    out = x.new_full(filled.shape, fill)
    out[filled] = x
    return out
