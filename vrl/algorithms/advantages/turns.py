"""Turns as the policy took them, for the turn-aware estimators grpo_turn, gigpo and bi_level_gae.

Borders come from the turn ids of the rollout, never from where rewards stand: a turn may well have reward 0.
"""

from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from vrl.algorithms import segments
from vrl.algorithms.advantages.registry import AdvantageInputs
from vrl.algorithms.advantages.sampled import SampledTokens
from vrl.algorithms.segments import Turns


@final
@dataclass(frozen=True, slots=True)
class SampledTurns:
    """The sampled tokens of a batch with the K turns they form. Turns without a sampled token are no time steps."""

    sampled: SampledTokens
    turns: Turns

    @classmethod
    def of(cls, inputs: AdvantageInputs) -> "SampledTurns":
        """ValueError if the turn ids of a row go down."""
        assert inputs.turn_ids is not None  # the registry refuses a call without them
        sampled = SampledTokens.of(inputs)
        return cls(sampled, Turns.of(inputs.turn_ids.index_select(0, sampled.positions), sampled.counts))

    def returns(self, gamma: float) -> Float[Tensor, " K"]:
        """G_k = sum over this and all later turns j of the row of gamma^(j-k) r_j, as float64.

        r_j is the sum of the rewards of turn j; those on tokens behind it that were not sampled belong to it. The sums
        are rounded to the rewards' dtype: finer differences come from the rounding of the rewards (0.81 * 1 and
        0.9 * 0.9), and the division by a group's std would blow them up.
        """
        rewards = segments.row_sum(self.sampled.rewards.double(), self.turns.offsets)
        return segments.reverse_scan(rewards, self.turns.per_row, gamma).to(self.sampled.rewards.dtype).double()

    def to_tokens(self, x: Float[Tensor, " K"]) -> Float[Tensor, " T"]:
        """Gives every sampled token the value of its turn, in the rewards' dtype; 0 elsewhere."""
        sampled = self.sampled
        spread = segments.spread(x.to(sampled.rewards.dtype), self.turns.offsets, sampled.rewards.numel())
        return sampled.to_tokens(spread)
