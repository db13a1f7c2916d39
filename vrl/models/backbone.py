"""The packed forward pass up to the hidden states, for text models and Qwen2.5-VL. Policy and value model share it."""

from collections.abc import Sequence
from typing import Any, TypeGuard

from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import Qwen2_5_VLModel

from vrl.models.attention import PLANS_KEYWORD
from vrl.models.packing import PackedBatch
from vrl.models.qwen2_5_vl import backbone as qwen2_5_vl


def is_vision_language(base: nn.Module) -> TypeGuard[Qwen2_5_VLModel]:
    """Tell whether the model has a vision tower that vrl can run."""
    return isinstance(base, Qwen2_5_VLModel)


def hidden_states(base: nn.Module, packed: PackedBatch) -> Float[Tensor, "T W"]:
    """Return the hidden states of a packed batch before any head; rows never see one another.

    `use_cache=False` always: with a cache, transformers takes the packed sequence for one row and says nothing.
    """
    if is_vision_language(base):
        return qwen2_5_vl.decode(base, qwen2_5_vl.embed(base, packed), packed)
    if packed.image_grid_thw is not None:
        raise ValueError(f"the batch has images, but a {_config(base).model_type} model takes text only")
    return base(
        input_ids=packed.input_ids[None],
        position_ids=packed.position_ids[None],
        use_cache=False,
        cu_seq_lens_q=packed.cu_seqlens,
        cu_seq_lens_k=packed.cu_seqlens,
        max_length_q=packed.max_length,
        max_length_k=packed.max_length,
        **{PLANS_KEYWORD: packed.plans},
    ).last_hidden_state[0]


def follows(packed: PackedBatch) -> Bool[Tensor, " T"]:
    """Return which tokens have a token before them in their row: all but the first of each."""
    return packed.position_ids != 0


def decoder_layers(base: nn.Module) -> Sequence[nn.Module]:
    """Return the decoder's layers, to shard and recompute one by one."""
    text = base.language_model if is_vision_language(base) else base
    wanted = _config(text).num_hidden_layers
    for child in text.children():
        if isinstance(child, nn.ModuleList) and len(child) == wanted:
            return list(child)
    raise ValueError(f"found no list of {wanted} decoder layers in a {_config(base).model_type} model")


def vision_blocks(base: nn.Module) -> Sequence[nn.Module]:
    """Return the vision tower's blocks; none for text models."""
    return list(base.visual.blocks) if is_vision_language(base) else []


def _config(model: nn.Module) -> Any:
    """Return the library's config, which a module's type does not tell of."""
    return model.config
