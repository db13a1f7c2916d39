"""The policy and the value model as plain padded forwards of transformers, behind the interface of the packed ones."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vrl.models.packing import PackedBatch
from vrl.models.policy import BAN_SHIFT, CausalPolicy, TokenOutputs
from vrl.models.token_log_probs import Extra
from vrl.models.value import ValueModel


def hidden_states(base: Any, packed: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return hidden states `[B, L, W]` of right-padded rows, and the mask `[B, L]` of what is no padding."""
    borders = packed.cu_seqlens.tolist()
    lengths = [end - begin for begin, end in pairwise(borders)]
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    ids[mask] = packed.input_ids
    inputs: dict[str, Tensor] = {"input_ids": ids, "attention_mask": mask.long()}
    if packed.mrope_positions is not None:
        positions = torch.zeros(3, *mask.shape, dtype=torch.int64)
        positions[:, mask] = packed.mrope_positions.T
        inputs["position_ids"] = positions
        if packed.pixel_values is not None:
            assert packed.image_grid_thw is not None
            inputs |= _images(base, packed.pixel_values, packed.image_grid_thw, packed.visual_index)
    for part in base.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = "eager"
    return base(**inputs, use_cache=False).last_hidden_state, mask


def _images(base: Any, pixels: Tensor, grids: Tensor, index: Tensor | None) -> dict[str, Tensor]:
    """Return the images once for each place where they stand; `index` says which visual token is at a placeholder."""
    assert index is not None
    counts = grids.prod(dim=1) // base.config.vision_config.spatial_merge_size**2
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    patches = pixels.split(grids.prod(dim=1).tolist())
    order, start = [], 0
    while start < len(index):
        order.append(int(owner[index[start]]))
        start += int(counts[order[-1]])
    return {"pixel_values": torch.cat([patches[k] for k in order]), "image_grid_thw": grids[order]}


class PaddedPolicy(nn.Module):
    """See `vrl.models.policy.CausalPolicy`. All logits at once."""

    def __init__(self, policy: CausalPolicy) -> None:
        super().__init__()
        self.hf = policy.hf

    def forward(
        self,
        packed: PackedBatch,
        *,
        temperature: float = 1.0,
        banned_ids: Sequence[int] = (),
        want: Extra = Extra.NONE,
        chunk_tokens: int = 0,
        positions: Tensor | None = None,
    ) -> TokenOutputs:
        head: Any = self.hf.get_output_embeddings()
        hidden, mask = hidden_states(self.hf.base_model, packed)
        logits = head(hidden)
        logits[..., list(banned_ids)] += BAN_SHIFT
        logs = (logits / temperature).log_softmax(-1)[:, :-1]
        ids = torch.zeros(mask.shape, dtype=torch.int64)
        ids[mask] = packed.input_ids
        log_probs = nn.functional.pad(logs.gather(-1, ids[:, 1:, None])[..., 0], (1, 0))[mask]
        entropy = nn.functional.pad(-(logs.exp() * logs).sum(-1), (1, 0))[mask]
        if positions is not None:
            log_probs, entropy = (torch.where(positions, x, 0.0) for x in (log_probs, entropy))
        return TokenOutputs(log_probs=log_probs, entropy=entropy, sum_pi_squared=None)


class PaddedValue(nn.Module):
    """See `vrl.models.value.ValueModel`."""

    def __init__(self, model: ValueModel) -> None:
        super().__init__()
        self.backbone, self.value_head = model.backbone, model.value_head

    def forward(self, packed: PackedBatch) -> Tensor:
        hidden, mask = hidden_states(self.backbone, packed)
        scores = self.value_head(hidden)[..., 0]
        return nn.functional.pad(scores[:, :-1], (1, 0))[mask]
