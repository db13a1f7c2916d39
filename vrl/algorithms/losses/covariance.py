"""The covariance of log-prob and advantage that clip_cov and kl_cov choose tokens by (arXiv 2505.22617)."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vrl.algorithms import segments
from vrl.algorithms.losses.registry import LossInputs


def token_covariance(inputs: LossInputs) -> tuple[Float[Tensor, " N"], Int64[Tensor, " N"]]:
    """(log_prob - mean) (A - mean) of the sampled tokens, and where they stand. Means over the rows given, float64."""
    at = inputs.mask.nonzero().squeeze(1)
    return _centred(inputs.log_probs.detach()[at]) * _centred(inputs.advantages[at]), at


def share_of(ratio: float, tokens: int) -> int:
    """How many of `tokens` a positive ratio stands for: rounded down, at least 1; 0 for ratio 0 or without tokens."""
    return min(max(int(ratio * tokens), 1), tokens) if ratio > 0 else 0


def _centred(x: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    if x.numel() == 0:
        return x.double()
    above = x.double() - x[0].double()  # equal values become exactly 0 before any rounding
    one_row = torch.tensor([0, x.numel()], device=x.device)
    return above - segments.row_mean(above, torch.ones_like(x, dtype=torch.bool), one_row)
