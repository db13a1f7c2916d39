"""The packed forward pass up to the hidden states, for text models and Qwen2.5-VL. Policy and value model share it."""

from collections.abc import Sequence
from typing import Any, TypeGuard

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Qwen2_5_VLModel

from vrl.models.attention import PLANS_KEYWORD, VARLEN_ATTENTION
from vrl.models.packing import PackedBatch
from vrl.models.qwen2_5_vl import backbone as qwen2_5_vl


def is_vision_language(base: nn.Module) -> TypeGuard[Qwen2_5_VLModel]:
    """Tell whether the model has a vision tower that vrl can run."""
    return isinstance(base, Qwen2_5_VLModel)


def hidden_states(base: nn.Module, packed: PackedBatch) -> Float[Tensor, "N W"]:
    """Return the hidden states of a packed batch before any head; rows never see one another.

    All T of them, or those of its `computed` tokens where rows share prompts; under sequence parallelism this rank's
    slice of them, filled up (`predicted_here` knows what is where).

    `use_cache=False` always: with a cache, transformers takes the packed sequence for one row and says nothing.

    Raises:
        ValueError: images for a text model, or another attention than vrl's for shared prompts or parts of a sequence.
    """
    packed, shared = packed.computed, packed.compact is not None
    sequence = packed.plans.sequence
    if (sequence is not None or shared) and _config(base).get_text_config()._attn_implementation != VARLEN_ATTENTION:
        what = "shared prompts" if shared else "sequence parallelism"
        raise ValueError(f"{what}: attention 'varlen' is needed, take attn_implementation out of the overrides")
    if is_vision_language(base):
        return qwen2_5_vl.decode(base, qwen2_5_vl.embed(base, packed), packed)
    if packed.image_grid_thw is not None:
        raise ValueError(f"the batch has images, but a {_config(base).model_type} model takes text only")
    positions = packed.position_ids
    if sequence is None:
        inputs: dict[str, Tensor] = {"input_ids": packed.input_ids[None]}
    else:
        positions = sequence.slice(positions)
        inputs = {"inputs_embeds": _embeddings(base)(sequence.slice(packed.input_ids))[None]}
    return base(
        **inputs,
        position_ids=positions[None],
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


def predicted_here(
    packed: PackedBatch, wanted: Bool[Tensor, " T"] | None = None
) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"]]:
    """Return the tokens that a head predicts from this rank's hidden states, and the places of these states.

    All tokens but the first of a row, or those `wanted` of them; each has its state at the token before.
    """
    asked = follows(packed) if wanted is None else follows(packed) & wanted
    before, place = states_here(packed, asked.nonzero()[:, 0] - 1)
    return before + 1, place


def states_here(packed: PackedBatch, index: Int[Tensor, " N"]) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"]]:
    """Return those of some tokens whose own hidden states are on this rank, and the places of these states."""
    place = index if packed.compact is None else packed.compact.place[index]
    sequence, tokens = packed.plans.sequence, packed.computed.plans.tokens
    if sequence is None:
        return index, place
    place = place - sequence.begin(tokens)
    here = (place >= 0) & (place < sequence.share(tokens))
    return index[here], place[here]


def by_token(packed: PackedBatch, index: Int[Tensor, " M"], found: Float[Tensor, " M"]) -> Float[Tensor, " T"]:
    """Return results at their tokens, 0 elsewhere; under sequence parallelism those of all ranks, on each of them."""
    spread = found.new_zeros(len(packed.input_ids)).index_copy(0, index, found)
    return spread if packed.plans.sequence is None else packed.plans.sequence.join(spread)


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


def _embeddings(base: Any) -> nn.Module:
    return base.get_input_embeddings()


def _config(model: nn.Module) -> Any:
    """Return the library's config, which a module's type does not tell of."""
    return model.config
