"""Direct reward optimisation (DRO, arXiv 2405.19107), per token as in verl: quadratic penalty in place of a clip."""

from vrl.algorithms.losses.registry import LossInputs, LossOutputs, LossParams, register_policy_loss


@register_policy_loss("dro")
def dro(inputs: LossInputs, params: LossParams) -> LossOutputs:
    """-(A log_prob - dro_beta / 2 (log_prob - old_log_prob)^2). Metric: ppo_kl.

    Deviation: the paper learns a value function and works on whole answers against a reference; here the advantage
    stands for the difference and the old policy for the reference. verl makes the user give dro_beta.
    """
    delta = inputs.log_probs - inputs.old_log_probs
    loss = -inputs.advantages * inputs.log_probs + 0.5 * params.dro_beta * delta.square()
    return LossOutputs(inputs.weighted(loss), {"ppo_kl": -delta.detach()})
