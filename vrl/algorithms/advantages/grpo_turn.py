"""Group-relative advantages turn by turn: GRPO (arXiv 2402.03300) on the discounted return of each turn."""

import torch

from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageOutputs, AdvantageParams, register_advantage
from vrl.algorithms.advantages.turns import SampledTurns
from vrl.algorithms.segments import Groups


@register_advantage("grpo_turn", needs_turn_ids=True)
def grpo_turn(inputs: AdvantageInputs, params: AdvantageParams) -> AdvantageOutputs:
    """(G_k - mean) / (std + eps) on every sampled token of turn k; `returns` are the G_k.

    G_k = sum over j >= k of gamma^(j-k) r_j with r_j the rewards of turn j: the outcome reward stands in the last turn.
    Mean and std (n - 1) are over the turns of the group with the same turn id, or over all turns of the group where
    fewer than two of its rows reach that turn; `over_all_turns` always takes all. `norm_adv_by_std=False` leaves the
    division out. Equal returns give exactly 0; a group with a single turn in all has mean 0 and std 1.

    With one turn in each row this is `grpo`, except that rows without a sampled token count in grpo's mean.
    """
    steps = SampledTurns.of(inputs)
    returns = steps.returns(params.gamma)
    group = Groups.of(inputs.group).index[steps.turns.row]
    advantages = Groups.of(group).normalised(returns, params.eps, by_std=params.norm_adv_by_std)
    if not params.over_all_turns:
        same_turn = Groups.of_pairs(group, steps.turns.ids)
        by_turn = same_turn.normalised(returns, params.eps, by_std=params.norm_adv_by_std)
        advantages = torch.where(same_turn.alone, advantages, by_turn)
    return AdvantageOutputs(advantages=steps.to_tokens(advantages), returns=steps.to_tokens(returns))
