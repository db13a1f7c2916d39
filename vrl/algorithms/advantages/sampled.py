"""Time as the policy saw it, for gae, reinforce_plus_plus and remax: only the sampled tokens of each row, in order.

Observation tokens between two turns are no time steps: nothing is discounted or bootstrapped over them.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vrl.algorithms import segments
from vrl.algorithms.advantages.registry import AdvantageInputs


@final
@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The N sampled tokens of a batch: their flat `positions [N]`, how many each row has `counts [B]`, and rewards."""

    positions: Int64[Tensor, " N"]
    counts: Int64[Tensor, " B"]
    rewards: Float[Tensor, " N"]
    total: int

    @classmethod
    def of(cls, inputs: AdvantageInputs) -> "SampledTokens":
        """A reward on a token that was not sampled goes to the last sampled token of its row before it, if any."""
        mask, offsets = inputs.mask, inputs.offsets
        positions = mask.nonzero().squeeze(1)
        counts = segments.row_counts(mask, offsets)
        rewards = inputs.token_level_rewards.index_select(0, positions)
        stray = ((inputs.token_level_rewards != 0) & ~mask).nonzero().squeeze(1)
        if stray.numel():
            row = torch.searchsorted(offsets, stray, right=True) - 1
            before = torch.searchsorted(positions, stray) - 1
            credited = before >= (counts.cumsum(0) - counts)[row]
            rewards = rewards.index_add(0, before[credited], inputs.token_level_rewards[stray[credited]])
        return cls(positions=positions, counts=counts, rewards=rewards, total=mask.numel())

    def next_of(self, x: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """x of the next sampled token of the same row; 0 behind the last one."""
        return segments.next_in_row(x, self.counts)

    def discounted_sum(self, x: Float[Tensor, " N"], decay: float) -> Float[Tensor, " N"]:
        """Sum over this and all later sampled tokens of the row of x times decay to the distance."""
        return segments.reverse_scan(x, self.counts, decay)

    def to_tokens(self, x: Float[Tensor, " N"]) -> Float[Tensor, " T"]:
        """Back to all tokens; 0 where none was sampled."""
        return x.new_zeros(self.total).scatter_(0, self.positions, x)
