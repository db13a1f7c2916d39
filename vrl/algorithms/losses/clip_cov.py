"""Clip-Cov (The Entropy Mechanism of RL for reasoning models, arXiv 2505.22617): a few tokens lose their gradient."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vrl.algorithms.losses.covariance import share_of, token_covariance
from vrl.algorithms.losses.ratio import clipped_surrogate, log_ratio
from vrl.algorithms.losses.registry import LossInputs, LossOutputs, LossParams, register_policy_loss


def choose(inputs: LossInputs, params: LossParams, generator: torch.Generator) -> Bool[Tensor, " T"]:
    """Random share `clip_cov_ratio` of the tokens, out of those with clip_cov_lb < covariance < clip_cov_ub.

    Covariance, share and choice are over all rows given, the whole mini-batch; tokens that PPO clips are not chosen.
    With `log_probs` of the weights before the update this is the paper's choice. Where the caller gives the old
    log-probs instead (known without a forward pass) it is exact in the first update after a rollout and a deviation
    in later ones. The share is of all sampled tokens, rounded down, at least one.
    """
    covariance, at = token_covariance(inputs)
    _, clipped = _surrogate(inputs, params)
    free = clipped[at] == 0
    candidates = at[(covariance > params.clip_cov_lb) & (covariance < params.clip_cov_ub) & free]
    order = torch.randperm(candidates.numel(), generator=generator).to(at.device)
    chosen = torch.zeros_like(inputs.mask)
    chosen[candidates[order[: share_of(params.clip_cov_ratio, at.numel())]]] = True
    return chosen


@register_policy_loss("clip_cov", chooses=choose)
def clip_cov(inputs: LossInputs, params: LossParams) -> LossOutputs:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) without the dual clip; 0 on the tokens of `choose` (`selected`).

    Metrics: pg_clipfrac (tokens left out, as in verl), ppo_kl. Deviation from verl: it takes means and choice over
    each micro-batch, so that they depend on how the mini-batch is cut.
    """
    assert inputs.selected is not None  # the registry refuses a call without them
    loss, _ = _surrogate(inputs, params)
    metrics = {"pg_clipfrac": inputs.selected.to(loss.dtype), "ppo_kl": -log_ratio(inputs).detach()}
    return LossOutputs(inputs.weighted(loss * ~inputs.selected), metrics)


def _surrogate(inputs: LossInputs, params: LossParams) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    ratio = log_ratio(inputs).exp()
    return clipped_surrogate(ratio, inputs.advantages, params.clip_ratio_low, params.clip_ratio_high)
