"""A trained policy back to a Hugging Face folder. Called by the actor when it exports."""

from collections.abc import Iterator
from pathlib import Path

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
    # Names on disk are not always those in memory; AutoModel and the other loaders expect the former.
    policy.hf.save_pretrained(folder, state_dict=state)
    renderer.save_pretrained(folder)
