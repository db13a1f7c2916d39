"""A trained policy back to a Hugging Face folder. Called by the actor when it exports."""

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from torch import Tensor

from vrl.models.policy import CausalPolicy
from vrl.models.renderer import HFRenderer


def save_hf_folder(
    policy: CausalPolicy, weights: Iterator[tuple[str, Tensor]], renderer: HFRenderer, folder: Path, *, write: bool
) -> None:
    """Write weights, config, tokenizer and processor so that transformers and vLLM load the folder.

    `weights` yields full tensors and is a collective: every rank must call this, one of them with `write`.
    """
    state = {name: tensor.to("cpu", copy=True) for name, tensor in weights if write}
    if not write:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(state, folder, filename_pattern="model{suffix}.safetensors", max_shard_size="5GB")
    policy.hf.config.save_pretrained(folder)
    if policy.hf.generation_config is not None:
        policy.hf.generation_config.save_pretrained(folder)
    renderer.save_pretrained(folder)
