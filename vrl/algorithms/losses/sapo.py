"""Soft adaptive policy optimisation (arXiv 2511.20347): a sigmoid gate in place of the hard clip."""

import torch

from vrl.algorithms.losses.ratio import log_ratio
from vrl.algorithms.losses.registry import LossInputs, LossOutputs, LossParams, register_policy_loss


@register_policy_loss("sapo", aggregation="seq-mean-token-mean")
def sapo(inputs: LossInputs, params: LossParams) -> LossOutputs:
    """-A sigmoid(tau (r - 1)) 4 / tau, tau_pos where A > 0 and tau_neg elsewhere. At r = 1 the gradient is PPO's."""
    delta = log_ratio(inputs)
    tau = torch.where(inputs.advantages > 0, params.tau_pos, params.tau_neg).to(delta.dtype)
    gate = torch.sigmoid(tau * (delta.exp() - 1.0)) * 4.0 / tau
    return LossOutputs(inputs.weighted(-inputs.advantages * gate), {"ppo_kl": -delta.detach()})
