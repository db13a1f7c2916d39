"""CISPO (MiniMax-M1, arXiv 2506.13585): the importance weight is clipped and detached, no token loses its gradient."""

from vrl.algorithms.losses.ratio import log_ratio
from vrl.algorithms.losses.registry import LossInputs, LossOutputs, LossParams, register_policy_loss


@register_policy_loss("cispo")
def cispo(inputs: LossInputs, params: LossParams) -> LossOutputs:
    """-sg(clip(r, 1 - low, 1 + high)) A log_prob. Metrics: pg_clipfrac (weight outside the bounds), ppo_kl."""
    delta = log_ratio(inputs).detach()
    ratio = delta.exp()
    weight = ratio.clamp(1.0 - params.clip_ratio_low, 1.0 + params.clip_ratio_high)
    loss = -weight * inputs.advantages * inputs.log_probs
    return LossOutputs(inputs.weighted(loss), {"pg_clipfrac": (weight != ratio).to(delta.dtype), "ppo_kl": -delta})
