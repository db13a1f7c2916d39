"""Clipped value loss of PPO (arXiv 1707.06347, as in OpenAI's baselines). Called by the critic for each micro-batch."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vrl.algorithms.losses.registry import LossOutputs


def value_loss(
    values: Float[Tensor, " T"],
    old_values: Float[Tensor, " T"],
    returns: Float[Tensor, " T"],
    mask: Bool[Tensor, " T"],
    cliprange_value: float,
) -> LossOutputs:
    """max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2 per sampled token, 0 elsewhere.

    Masked tokens are never read. Metric: vf_clipfrac (the clipped term is the larger one).
    Raises ValueError for a negative `cliprange_value`.
    """
    if cliprange_value < 0:
        raise ValueError(f"critic.cliprange_value must not be negative, got {cliprange_value}")
    new, old, target = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    plain = (new - target).square()
    clipped = (new.clamp(old - cliprange_value, old + cliprange_value) - target).square()
    return LossOutputs(
        per_token=0.5 * torch.maximum(plain, clipped),
        metrics={"vf_clipfrac": (clipped > plain).to(plain.dtype)},
    )
