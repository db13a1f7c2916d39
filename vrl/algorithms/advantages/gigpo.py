"""Group-in-group policy optimisation (arXiv 2505.10978): whole episodes compared, and turns from the same state."""

import torch
from jaxtyping import Float
from torch import Tensor

from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageOutputs, AdvantageParams, register_advantage
from vrl.algorithms.advantages.turns import SampledTurns
from vrl.algorithms.segments import Groups


@register_advantage("gigpo", needs_turn_ids=True, needs_state_ids=True)
def gigpo(inputs: AdvantageInputs, params: AdvantageParams) -> AdvantageOutputs:
    """A^E + step_advantage_w A^S on every sampled token of a turn; `returns` are the G_k.

    A^E = (score - mean) / (std + eps) over the rows of a group. A^S = (G_k - mean) / (std + eps) over the turns of the
    group that answer the same state, wherever they stand; G_k = sum over j >= k of gamma^(j-k) r_j. std has n - 1;
    `norm_adv_by_std=False` leaves both divisions out. A row is an episode and a turn is a step; which states are equal
    (the same observation, or a similar one) is for whoever numbers `state_ids`, read on a turn's first sampled token.

    What is alone in its group, a row or a turn, is its own mean and gets 0, unlike in grpo. The authors' code takes
    the episode mean over steps, so that long episodes weigh more; the paper and this code take it over episodes.
    """
    assert inputs.state_ids is not None  # the registry refuses a call without them
    steps = SampledTurns.of(inputs)
    returns = steps.returns(params.gamma)
    groups = Groups.of(inputs.group)
    states = inputs.state_ids[steps.sampled.positions[steps.turns.offsets[:-1]]]
    same_state = Groups.of_pairs(groups.index[steps.turns.row], states.long())
    episode = _relative(groups, inputs.scores(), params)[steps.turns.row]
    step = _relative(same_state, returns, params)
    advantages = steps.to_tokens(episode + params.step_advantage_w * step)
    return AdvantageOutputs(advantages=advantages, returns=steps.to_tokens(returns))


def _relative(groups: Groups, x: Float[Tensor, " B"], params: AdvantageParams) -> Float[Tensor, " B"]:
    return torch.where(groups.alone, 0.0, groups.normalised(x, params.eps, by_std=params.norm_adv_by_std))
