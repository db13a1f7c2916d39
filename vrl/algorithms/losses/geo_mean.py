"""Geometric-mean policy optimisation (GMPO, arXiv 2507.20673): one loss a row from its clipped geometric-mean ratio."""

import torch

from vrl.algorithms import segments
from vrl.algorithms.losses.ratio import MAX_LOG_RATIO
from vrl.algorithms.losses.registry import LossInputs, LossOutputs, LossParams, register_policy_loss


@register_policy_loss("geo_mean", aggregation="seq-mean-token-mean")
def geo_mean(inputs: LossInputs, params: LossParams) -> LossOutputs:
    """-mean(A) exp(mean of the clipped log-ratios) over the sampled tokens of a row, put on each of them.

    `clip_ratio_low/high` bound the log-ratio itself, against the advantage's sign only, as PPO's clip does. Importance
    weights enter as their geometric mean over the row. The mean log-ratio is held within 20 from above, so that a row
    far off stays finite.
    """
    mask, offsets, total = inputs.mask, inputs.offsets, inputs.mask.numel()
    delta = inputs.log_probs - inputs.old_log_probs
    sign = inputs.advantages.sign()
    bounded = sign * torch.minimum(sign * delta, sign * delta.clamp(-params.clip_ratio_low, params.clip_ratio_high))
    ratio = segments.row_mean(bounded, mask, offsets).clamp(max=MAX_LOG_RATIO).exp()
    loss = -segments.row_mean(inputs.advantages, mask, offsets) * ratio
    if inputs.rollout_is_weights is not None:
        loss = loss * segments.row_mean(inputs.rollout_is_weights.log(), mask, offsets).exp()
    metrics = {"ppo_kl": -delta.detach()}
    return LossOutputs(torch.where(mask, segments.spread(loss, offsets, total), 0.0), metrics)
