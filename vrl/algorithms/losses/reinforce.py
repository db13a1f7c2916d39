"""Plain policy gradient. GPG (arXiv 2504.02546) is the same loss; its scaling is in the advantages."""

from vrl.algorithms.losses.registry import LossInputs, LossOutputs, LossParams, register_policy_loss


@register_policy_loss("gpg")
@register_policy_loss("reinforce")
def reinforce(inputs: LossInputs, _params: LossParams) -> LossOutputs:
    """-A log_prob."""
    return LossOutputs(inputs.weighted(-inputs.advantages * inputs.log_probs), {})
