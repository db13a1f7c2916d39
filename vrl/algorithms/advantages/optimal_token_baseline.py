"""Optimal token baseline (arXiv 2602.07078): a baseline for each token position, weighted by accumulated variance."""

import torch
from jaxtyping import Float
from torch import Tensor

from vrl.algorithms import segments
from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageOutputs, AdvantageParams, register_advantage
from vrl.algorithms.advantages.sampled import SampledTokens
from vrl.algorithms.segments import Groups


@register_advantage("optimal_token_baseline", needs_sum_pi_squared=True)
def optimal_token_baseline(inputs: AdvantageInputs, _params: AdvantageParams) -> AdvantageOutputs:
    """A_n = G_n - sum(G_n W_n) / sum(W_n), sums over the rows of the group that have an n-th sampled token.

    G_n is the undiscounted reward to go; W_n = sum over i <= n of rho_i^2 (1 - 2 pi_i + sum over the vocabulary of
    pi^2), the squared norm of the gradient with respect to the logits, added up; rho are `rollout_is_weights` if given.
    `returns` are the G_n. n counts sampled tokens, across turns: this is verl's `tir_optimal_token_baseline` too.

    Where one row alone goes on, its baseline is 0, as for a row alone in its group (so does verl by default). Equal
    returns give exactly 0. Rounding below 0 of a squared norm is cut off, and no epsilon is added to the divisor.
    """
    sampled = SampledTokens.of(inputs)
    returns = sampled.discounted_sum(sampled.rewards, 1.0)
    advantages = _positions(inputs, sampled).centred(returns.double(), weights=_variance(inputs, sampled))
    return AdvantageOutputs(
        advantages=sampled.to_tokens(advantages.to(returns.dtype)), returns=sampled.to_tokens(returns)
    )


def _positions(inputs: AdvantageInputs, sampled: SampledTokens) -> Groups:
    """Sampled tokens grouped by (group, how many sampled tokens stand before them in the row)."""
    groups = Groups.of(inputs.group)
    longest = groups.max(sampled.counts.double()).long()
    starts = (longest.cumsum(0) - longest)[groups.index]
    index = segments.places(starts, sampled.counts, sampled.positions.numel())
    return Groups(index=index, sizes=torch.bincount(index))


def _variance(inputs: AdvantageInputs, sampled: SampledTokens) -> Float[Tensor, " N"]:
    """W of every sampled token, in float64."""
    assert inputs.old_log_probs is not None  # the registry refuses a call without them
    assert inputs.sum_pi_squared is not None
    pi = inputs.old_log_probs.index_select(0, sampled.positions).double().exp_()
    step = inputs.sum_pi_squared.index_select(0, sampled.positions).double().add_(pi, alpha=-2.0).add_(1.0)
    step.clamp_(min=0.0)
    if inputs.rollout_is_weights is not None:
        step.mul_(inputs.rollout_is_weights.index_select(0, sampled.positions).square())
    running = torch.nn.functional.pad(step.cumsum(0), (1, 0))
    before = running[sampled.counts.cumsum(0) - sampled.counts]
    return running[1:] - torch.repeat_interleave(before, sampled.counts, output_size=step.numel())
