"""Bi-level generalised advantage estimation (VAGEN, arXiv 2510.16907): first over turns, then inside each turn."""

from vrl.algorithms import segments
from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageOutputs, AdvantageParams, register_advantage
from vrl.algorithms.advantages.turns import SampledTurns


@register_advantage("bi_level_gae", needs_critic=True, needs_turn_ids=True)
def bi_level_gae(inputs: AdvantageInputs, params: AdvantageParams) -> AdvantageOutputs:
    """Turn advantages by gae over the last tokens of the turns; each starts the gae over the tokens of its turn.

    Turns: delta_k = r_k + high_level_gamma V_{k+1} - V_k; A_k = delta_k + high_level_gamma lam A_{k+1}, with r_k and
    V_k the reward and value of the turn's last sampled token. Tokens: A_t = A_k on that token; before it in the turn
    A_t = r_t + gamma V_{t+1} - V_t + gamma lam A_{t+1}. returns = A + V; then A is whitened.

    A reward before a turn's last token, such as a KL penalty, is seen inside its turn only, as in the paper. One turn
    a row gives `gae`. The public implementations see a turn only where a reward is not 0, and then skip the
    others; here the borders are the turn ids.
    """
    assert inputs.values is not None  # the registry refuses a call without them
    steps = SampledTurns.of(inputs)
    sampled, turns = steps.sampled, steps.turns
    values = inputs.values.index_select(0, sampled.positions).to(sampled.rewards.dtype)
    last = turns.offsets[1:] - 1
    between = segments.next_in_row(values[last], turns.per_row) * params.high_level_gamma
    turn_delta = between + sampled.rewards[last] - values[last]
    delta = segments.next_in_row(values, turns.lengths).mul_(params.gamma).add_(sampled.rewards).sub_(values)
    delta[last] = segments.reverse_scan(turn_delta, turns.per_row, params.high_level_gamma * params.lam)
    advantages = segments.reverse_scan(delta, turns.lengths, params.gamma * params.lam)
    return AdvantageOutputs(
        advantages=sampled.to_tokens(segments.standardised(advantages)),
        returns=sampled.to_tokens(advantages + values),
    )
