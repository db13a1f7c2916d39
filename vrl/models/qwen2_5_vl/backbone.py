"""Qwen2.5-VL's packed forward pass: vision tower, embeddings, decoder. Called by `models.backbone`."""

from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Qwen2_5_VLModel

from vrl.models.attention import PLANS_KEYWORD
from vrl.models.packing import PackedBatch

MODEL_TYPE: Final = "qwen2_5_vl"


def embed(base: Qwen2_5_VLModel, packed: PackedBatch) -> Float[Tensor, "T W"]:
    """Return token embeddings with the images put in their places.

    A batch without images still runs the vision tower, on one image of a single visual token that goes nowhere: under
    FSDP each rank must run the same all-gathers and reduce the same gradients, here zeros.

    Raises:
        ValueError: the number of placeholder tokens differs from the number of visual tokens.
    """
    config: Any = base.config
    text = base.get_input_embeddings()(packed.input_ids)
    pixels, grids = packed.pixel_values, packed.image_grid_thw
    place = packed.input_ids == config.image_token_id
    if pixels is None or grids is None:
        pixels, grids = _dummy_image(config.vision_config, packed.input_ids.device)
        expected = 0
    else:
        shown = packed.visual_index
        expected = len(pixels) // config.vision_config.spatial_merge_size**2 if shown is None else len(shown)
    found = int(place.sum())
    if found != expected:
        raise ValueError(
            f"the batch has {found} image placeholder tokens, but its images make {expected} visual tokens; "
            "rows must carry expanded placeholders and all their images"
        )
    trained = any(parameter.requires_grad for parameter in base.visual.parameters())
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        visual = base.visual(pixels, grid_thw=grids, **{PLANS_KEYWORD: packed.plans}).pooler_output
    if packed.visual_index is not None:
        visual = visual.index_select(0, packed.visual_index)
    return text.masked_scatter(place[:, None], visual.to(text.dtype))


def decode(base: Qwen2_5_VLModel, embeddings: Float[Tensor, "T W"], packed: PackedBatch) -> Float[Tensor, "N W"]:
    """Run the decoder over embeddings; returns the hidden states before the head, of this rank's tokens.

    The positions have four rows (text, time, height, width): transformers tells the rows of a packed sequence apart by
    the first, and with three rows lets them see one another without an error.

    Raises:
        ValueError: the batch has images but no 3-D positions.
    """
    text = packed.position_ids
    spatial = packed.mrope_positions
    if spatial is None:
        if packed.image_grid_thw is not None:
            raise ValueError("a batch with images needs 3-D positions: pass `positions` to pack()")
        spatial = text[:, None].expand(-1, 3)
    positions = torch.cat([text[:, None], spatial], dim=1)
    sequence = packed.plans.sequence
    if sequence is not None:
        embeddings, positions = sequence.slice(embeddings), sequence.slice(positions)
    return base.language_model(
        inputs_embeds=embeddings[None],
        position_ids=positions.T[:, None],
        use_cache=False,
        cu_seq_lens_q=packed.cu_seqlens,
        cu_seq_lens_k=packed.cu_seqlens,
        max_length_q=packed.max_length,
        max_length_k=packed.max_length,
        **{PLANS_KEYWORD: packed.plans},
    ).last_hidden_state[0]


def _dummy_image(vision: Any, device: torch.device) -> tuple[Float[Tensor, "P D"], Tensor]:
    side = vision.spatial_merge_size
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return torch.zeros(side**2, size, device=device), torch.tensor([[1, side, side]], device=device)
