"""What the losses over whole rows (tba, dpo) share: log-probs of rows, and outputs from one loss a row."""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vrl.algorithms import segments
from vrl.algorithms.losses.registry import LossInputs, LossOutputs


def row_log_probs(log_probs: Float[Tensor, " T"], offsets: Int64[Tensor, " B1"]) -> Float[Tensor, " B1-1"]:
    """Sum over the tokens of each row (masked ones hold 0), in float64: the losses live on small differences of it."""
    return segments.row_sum(log_probs.double(), offsets)


def row_outputs(
    inputs: LossInputs, per_row: Float[Tensor, " B"], row_metrics: Mapping[str, Float[Tensor, " B"]]
) -> LossOutputs:
    """The row's loss as it is, and on each of its sampled tokens."""
    spread = segments.spread(per_row, inputs.offsets, inputs.mask.numel())
    per_token = torch.where(inputs.mask, spread, 0.0).to(inputs.log_probs.dtype)
    return LossOutputs(per_token, {}, per_row, {name: values.detach() for name, values in row_metrics.items()})
