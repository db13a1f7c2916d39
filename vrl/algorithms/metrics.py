"""Numbers about a batch that the trainer logs: explained variance of the critic, share of groups without a signal."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from vrl.algorithms.segments import Groups


def explained_variance(values: Float[Tensor, " T"], returns: Float[Tensor, " T"], mask: Bool[Tensor, " T"]) -> float:
    """1 - Var(returns - values) / (Var(returns) + 1e-5) over the sampled tokens; 0 with fewer than two of them."""
    if int(mask.sum()) < 2:
        return 0.0
    wide_values, wide_returns = values[mask].double(), returns[mask].double()
    return float(1.0 - torch.var(wide_returns - wide_values) / (torch.var(wide_returns) + 1e-5))


def equal_group_share(scores: Float[Tensor, " B"], group: Int64[Tensor, " B"]) -> float:
    """Share of groups of two or more rows with one and the same score, which train nothing; 0 without any row."""
    groups = Groups.of(group)
    if groups.sizes.numel() == 0:
        return 0.0
    equal = (groups.min(scores) == groups.max(scores)) & (groups.sizes > 1)
    return float(equal.double().mean())
