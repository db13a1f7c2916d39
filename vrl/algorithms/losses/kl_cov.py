"""KL-Cov (The Entropy Mechanism of RL for reasoning models, arXiv 2505.22617): a few tokens pay for moving."""

import torch
from jaxtyping import Bool
from torch import Tensor

from vrl.algorithms.losses.covariance import share_of, token_covariance
from vrl.algorithms.losses.ratio import log_ratio
from vrl.algorithms.losses.registry import LossInputs, LossOutputs, LossParams, register_policy_loss


def choose(inputs: LossInputs, params: LossParams, _generator: torch.Generator) -> Bool[Tensor, " T"]:
    """The share `kl_cov_ratio` of the tokens with the largest covariance; of equal ones the first.

    Covariance, share and choice are over all rows given, the whole mini-batch. With `log_probs` of the weights before
    the update this is the paper's choice. Where the caller gives the old log-probs instead (known without a forward
    pass) it is exact in the first update after a rollout and a deviation in later ones. The share is rounded down, at
    least one token.
    """
    covariance, at = token_covariance(inputs)
    order = torch.sort(covariance, descending=True, stable=True).indices
    chosen = torch.zeros_like(inputs.mask)
    chosen[at[order[: share_of(params.kl_cov_ratio, at.numel())]]] = True
    return chosen


@register_policy_loss("kl_cov", chooses=choose)
def kl_cov(inputs: LossInputs, params: LossParams) -> LossOutputs:
    """-A r without a clip, plus ppo_kl_coef |log_prob - old_log_prob| on the tokens of `choose` (`selected`).

    The paper's penalty is a KL divergence; the absolute log-ratio in its place is verl's and the authors' code.
    Metric: ppo_kl, here the absolute log-ratio. Deviation from verl: it takes means and choice over each micro-batch,
    so that they depend on how the mini-batch is cut.
    """
    assert inputs.selected is not None  # the registry refuses a call without them
    distance = (inputs.log_probs - inputs.old_log_probs).abs()
    loss = -inputs.advantages * log_ratio(inputs).exp() + params.ppo_kl_coef * distance * inputs.selected
    return LossOutputs(inputs.weighted(loss), {"ppo_kl": distance.detach()})
