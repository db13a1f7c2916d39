"""The reward model: a classifier with one label that scores packed rows. Made by `loading.load_reward_model`."""

from collections.abc import Sequence
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from vrl.models import backbone
from vrl.models.packing import PackedBatch


@final
class RewardModel(nn.Module):
    """One score a row, that of `transformers`' own classifier on the row alone: its head at the last token.

    As there, tokens equal to `pad_id` at the end of a row are passed over. The head computes in float32 whatever the
    backbone's dtype.
    """

    def __init__(self, hf: PreTrainedModel, pad_id: int) -> None:
        super().__init__()
        self.hf = hf
        self._pad_id = pad_id

    def forward(self, packed: PackedBatch) -> Float[Tensor, " T"]:
        """Return each row's score at the token that it is read from, 0 elsewhere."""
        hidden = backbone.hidden_states(self.hf.base_model, packed)
        index, place = backbone.states_here(packed, self._read_from(packed))
        head: Any = self.hf.get_submodule("score")
        scores = linear(hidden[place].float(), head.weight.float())
        return backbone.by_token(packed, index, scores[:, 0])

    def decoder_layers(self) -> Sequence[nn.Module]:
        """Return the decoder's layers, to shard one by one."""
        return backbone.decoder_layers(self.hf.base_model)

    def vision_blocks(self) -> Sequence[nn.Module]:
        """Return nothing: a reward model reads text."""
        return []

    def _read_from(self, packed: PackedBatch) -> Int[Tensor, " B"]:
        """Return each row's last token that is no padding; its first when all are."""
        ids, starts, ends = packed.input_ids, packed.cu_seqlens[:-1].long(), packed.cu_seqlens[1:].long()
        places = torch.arange(len(ids), device=ids.device)
        real = torch.where(ids != self._pad_id, places, -1)
        return torch.maximum(real.cummax(0).values[ends - 1], starts)
