"""The probability ratio between the policy and the old policy, shared by the policy losses."""

import torch
from jaxtyping import Float
from torch import Tensor

from vrl.algorithms.losses.registry import LossInputs

# exp(20) is beyond any clip range and exp(89) leaves float32: the bound keeps a far-off token finite, nothing more.
MAX_LOG_RATIO = 20.0


def log_ratio(inputs: LossInputs) -> Float[Tensor, " T"]:
    """log_probs - old_log_probs, held within 20. NaN stays NaN."""
    return (inputs.log_probs - inputs.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(
    ratio: Float[Tensor, " T"], advantages: Float[Tensor, " T"], low: float, high: float
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """PPO's max(-A r, -A clip(r, 1 - low, 1 + high)), and 1.0 where the clipped term is the larger one."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(unclipped, clipped), (clipped > unclipped).to(ratio.dtype)
