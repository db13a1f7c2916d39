"""DPPO-Binary-TV (Rethinking the Trust Region in LLM RL, arXiv 2602.04879): trust region in probability, not ratio."""

import torch
from jaxtyping import Bool
from torch import Tensor

from vrl.algorithms.losses.ratio import log_ratio
from vrl.algorithms.losses.registry import LossInputs, LossOutputs, LossParams, register_policy_loss


@register_policy_loss("dppo_tv")
def dppo_tv(inputs: LossInputs, params: LossParams) -> LossOutputs:
    """-A sg(min(r, c)) log_prob inside the trust region, 0 outside.

    Inside: p - p_old <= high where A > 0, p - p_old >= -low elsewhere, with p = exp(log_prob): `clip_ratio_low/high`
    bound the total variation of token against all others (0.15 is usual), `clip_ratio_c` is c (20 in the paper's code;
    the 3.0 of the dual clip applies unless it is set). Metrics: pg_clipfrac (outside), pg_clipfrac_lower (0), ppo_kl.
    """
    change = (inputs.log_probs.exp() - inputs.old_log_probs.exp()).detach()
    inside = torch.where(inputs.advantages > 0, change <= params.clip_ratio_high, change >= -params.clip_ratio_low)
    return truncated_gradient(inputs, params, inside)


def truncated_gradient(inputs: LossInputs, params: LossParams, inside: Bool[Tensor, " T"]) -> LossOutputs:
    """The loss and metrics that both forms of DPPO share."""
    delta = log_ratio(inputs).detach()
    weight = delta.exp().clamp(max=params.clip_ratio_c) * inside
    outside = (~inside & inputs.mask).to(delta.dtype)
    metrics = {"pg_clipfrac": outside, "pg_clipfrac_lower": torch.zeros_like(delta), "ppo_kl": -delta}
    return LossOutputs(inputs.weighted(-inputs.advantages * weight * inputs.log_probs), metrics)
