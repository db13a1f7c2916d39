"""DPPO-Binary-KL (Rethinking the Trust Region in LLM RL, arXiv 2602.04879): trust region in a two-way KL divergence."""

import torch
from jaxtyping import Float
from torch import Tensor

from vrl.algorithms.losses.dppo_tv import truncated_gradient
from vrl.algorithms.losses.registry import LossInputs, LossOutputs, LossParams, register_policy_loss


@register_policy_loss("dppo_kl")
def dppo_kl(inputs: LossInputs, params: LossParams) -> LossOutputs:
    """-A sg(min(r, c)) log_prob inside the trust region, 0 outside.

    Outside: the token moved with its advantage (p > p_old where A > 0, p < p_old elsewhere) and the KL divergence
    between old and new choice of token against all others is above `clip_ratio_high` (A > 0) or `clip_ratio_low`
    (elsewhere); 0.05 is usual. `clip_ratio_c` is c, as in dppo_tv. Metrics as dppo_tv.
    """
    new, old = inputs.log_probs.detach(), inputs.old_log_probs
    divergence = _binary_kl(old, new)
    rising = (divergence <= params.clip_ratio_high) | (new <= old)
    falling = (divergence <= params.clip_ratio_low) | (new >= old)
    return truncated_gradient(inputs, params, torch.where(inputs.advantages > 0, rising, falling))


def _binary_kl(old: Float[Tensor, " T"], new: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)); infinite where p is 1 and p_old is not."""
    chance, others = old.exp(), -torch.expm1(old)
    rest = others * (_log_others(old) - _log_others(new))
    return chance * (old - new) + torch.where(others > 0, rest, 0.0)


def _log_others(log_prob: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """log(1 - exp(log_prob)), which float32 keeps also for probabilities near 1; -inf from 1 on."""
    return torch.log(-torch.expm1(log_prob.clamp(max=0.0)))
