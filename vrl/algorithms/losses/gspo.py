"""Group sequence policy optimisation (arXiv 2507.18071): one ratio a row, the geometric mean of its tokens'."""

from vrl.algorithms import segments
from vrl.algorithms.losses.ratio import clipped_surrogate
from vrl.algorithms.losses.registry import LossInputs, LossOutputs, LossParams, register_policy_loss

_MAX_LOG_RATIO = 10.0  # as in verl; keeps the exponential finite for a sequence far off the old policy


@register_policy_loss("gspo", aggregation="seq-mean-token-mean")
def gspo(inputs: LossInputs, params: LossParams) -> LossOutputs:
    """PPO's clipped loss with log r_t = log_prob_t - sg(log_prob_t) + sg(row mean of log_probs - old_log_probs).

    The value is the row's ratio on each of its tokens, the gradient goes through the token (GSPO-token). No dual clip.
    """
    delta = (inputs.log_probs - inputs.old_log_probs).detach()
    sequence = segments.row_mean(delta, inputs.mask, inputs.offsets)
    tied = inputs.log_probs - inputs.log_probs.detach()
    log_ratio = (tied + segments.spread(sequence, inputs.offsets, delta.numel())).clamp(max=_MAX_LOG_RATIO)
    loss, clipped = clipped_surrogate(log_ratio.exp(), inputs.advantages, params.clip_ratio_low, params.clip_ratio_high)
    return LossOutputs(inputs.weighted(loss), {"pg_clipfrac": clipped, "ppo_kl": -delta})
