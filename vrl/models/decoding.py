"""Next-token logits with cached keys and values: what the Hugging Face engine samples from.

The new tokens of all rows stand behind one another as in training: a new row brings its prompt, a running row the token
that was sampled last. One forward pass runs over them, and each row attends to its own cache; nothing is padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from vrl.models.backbone import is_vision_language
from vrl.models.packing import PackedBatch, pack
from vrl.models.policy import CausalPolicy
from vrl.models.qwen2_5_vl import backbone as qwen2_5_vl

CACHED_ATTENTION: Final = "vrl_cached"
_SEGMENTS: Final = "vrl_segments"  # keyword that travels through the model to every layer


@final
class RowCache:
    """Keys and values of one row, for at most `capacity` tokens; `length` of them are there."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(
        self, layer: int, key: Float[Tensor, "1 KV N D"], value: Float[Tensor, "1 KV N D"]
    ) -> tuple[Float[Tensor, "1 KV M D"], Float[Tensor, "1 KV M D"]]:
        """Store the keys and values of N new tokens; return those of the whole row, M = length + N."""
        if layer not in self._layers:
            self._layers[layer] = (_space(key, self.capacity), _space(value, self.capacity))
        end = self.length + key.shape[2]
        keys, values = self._layers[layer]
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Segment:
    """The new tokens of one row. `positions` and `images` (patches, grids) are for vision-language models only."""

    cache: RowCache
    ids: Sequence[int]
    positions: Int[Tensor, "N 3"] | None = None
    images: tuple[Float[Tensor, "P D"], Int[Tensor, "K 3"]] | None = None


@final
class Decoder:
    """A policy that decodes. It takes the policy over: training's packed forward pass no longer runs in it."""

    def __init__(self, policy: CausalPolicy) -> None:
        self._hf = policy.requires_grad_(False).eval().hf
        self._hf.config.get_text_config()._attn_implementation = CACHED_ATTENTION  # the vision tower keeps its own

    @torch.no_grad()  # no inference mode: cached patches of images are the learner's, too
    def logits(self, segments: Sequence[Segment]) -> Float[Tensor, "B V"]:
        """Run the new tokens of B rows, extend their caches, return the float32 logits behind the last token of each.

        Raises:
            ValueError: a row outgrows its cache, an empty segment, or images for a text model.
        """
        for segment in segments:
            if segment.cache.length + len(segment.ids) > segment.cache.capacity:
                raise ValueError(
                    f"a row of {segment.cache.length} tokens and {len(segment.ids)} new ones outgrows its cache of "
                    f"{segment.cache.capacity}"
                )
        batch = _packed(segments).to(self._hf.device)
        last = batch.cu_seqlens[1:].long() - 1
        hidden = self._hidden(segments, batch)[last]
        for segment in segments:
            segment.cache.length += len(segment.ids)
        head: Any = self._hf.get_output_embeddings()
        return head(hidden.to(head.weight.dtype)).float()

    def _hidden(self, segments: Sequence[Segment], batch: PackedBatch) -> Float[Tensor, "T W"]:
        base: Any = self._hf.base_model
        starts = [torch.full((len(segment.ids),), segment.cache.length) for segment in segments]
        text = batch.position_ids + torch.cat(starts).to(batch.position_ids.device)
        if is_vision_language(base):
            spatial = text[:, None].expand(-1, 3) if batch.mrope_positions is None else batch.mrope_positions
            body, positions = base.language_model, torch.cat([text[None], spatial.T])[:, None]
            inputs = {"inputs_embeds": qwen2_5_vl.embed(base, batch)[None]}
        else:
            if batch.image_grid_thw is not None:
                raise ValueError(f"a row has images, but a {base.config.model_type} model takes text only")
            body, positions = base, text[None]
            inputs = {"input_ids": batch.input_ids[None]}
        keywords = {"position_ids": positions, "use_cache": False, _SEGMENTS: segments}
        return body(**inputs, **keywords).last_hidden_state[0]


def cached_attention(
    module: nn.Module,
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 KV T D"],
    value: Float[Tensor, "1 KV T D"],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 T H D"], None]:
    """Attend from each row's new tokens to its whole cache; transformers calls this in every layer of a `Decoder`.

    Raises:
        ValueError: the layer wants something that is not implemented (mask, sinks, soft cap).
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown:
        raise ValueError(f"attention {CACHED_ATTENTION!r} does not implement {', '.join(unknown)}")
    segments: Sequence[Segment] = kwargs[_SEGMENTS]
    layer = cast(int, module.layer_idx)
    widths = [len(segment.ids) for segment in segments]
    pieces = zip(*(x.split(widths, dim=2) for x in (query, key, value)), strict=True)
    parts = []
    for segment, (q, k, v) in zip(segments, pieces, strict=True):
        keys, values = segment.cache.extend(layer, k, v)
        mask = _mask(segment.cache.length, keys.shape[2], kwargs.get("sliding_window"), q.device)
        causal = mask is None and q.shape[2] > 1
        grouped = q.shape[1] != k.shape[1]
        parts.append(
            scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, is_causal=causal, scale=kwargs.get("scaling"), enable_gqa=grouped
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _mask(begin: int, end: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return which tokens of a row its tokens from `begin` see, where "all" or "all before" does not say it."""
    if (begin == 0 or end - begin == 1) and (window is None or end <= window):
        return None
    distance = torch.arange(begin, end, device=device)[:, None] - torch.arange(end, device=device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _packed(segments: Sequence[Segment]) -> PackedBatch:
    lengths = torch.tensor([0] + [len(segment.ids) for segment in segments])
    positions = [segment.positions for segment in segments if segment.positions is not None]
    images = [segment.images for segment in segments if segment.images is not None]
    return pack(
        torch.tensor([token for segment in segments for token in segment.ids], dtype=torch.int64),
        lengths.cumsum(0),
        positions=torch.cat(positions) if positions else None,
        pixel_values=torch.cat([patches for patches, _ in images]) if images else None,
        image_grid_thw=torch.cat([grids for _, grids in images]) if images else None,
    )


def _space(like: Tensor, capacity: int) -> Tensor:
    return like.new_empty((*like.shape[:2], capacity, like.shape[3]))


AttentionInterface.register(CACHED_ATTENTION, cached_attention)
