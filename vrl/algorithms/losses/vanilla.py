"""PPO's clipped loss (arXiv 1707.06347), separate bounds (DAPO, arXiv 2503.14476), dual clip (arXiv 1912.09729)."""

import torch

from vrl.algorithms.losses.ratio import clipped_surrogate, log_ratio
from vrl.algorithms.losses.registry import LossInputs, LossOutputs, LossParams, register_policy_loss


@register_policy_loss("vanilla")
def vanilla(inputs: LossInputs, params: LossParams) -> LossOutputs:
    """max(-A r, -A clip(r, 1 - low, 1 + high)); where A < 0 no more than -A c. r = exp(log_probs - old_log_probs).

    Metrics: pg_clipfrac (clipped term chosen), pg_clipfrac_lower (dual clip at work), ppo_kl (old - new log-prob).
    """
    delta = log_ratio(inputs)
    surrogate, clipped = clipped_surrogate(
        delta.exp(), inputs.advantages, params.clip_ratio_low, params.clip_ratio_high
    )
    bound = -inputs.advantages * params.clip_ratio_c
    negative = inputs.advantages < 0
    loss = torch.where(negative, torch.minimum(surrogate, bound), surrogate)
    metrics = {
        "pg_clipfrac": clipped,
        "pg_clipfrac_lower": (negative & (surrogate > bound)).to(delta.dtype),
        "ppo_kl": -delta.detach(),
    }
    return LossOutputs(inputs.weighted(loss), metrics)
