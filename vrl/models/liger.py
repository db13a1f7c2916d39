"""Liger's Triton kernels in the place of a model's RMSNorm and SwiGLU layers, on a GPU (`model.use_liger`).

Its other kernels are left out: the fused cross-entropy, since log-probs come in chunks, and rotary embeddings,
which it replaces for all models of the process.
"""

import importlib
import sys
from typing import Final

from transformers import PreTrainedModel

from vrl.protocol.errors import ConfigError

MODEL_TYPES: Final = ("llama", "mistral", "qwen2", "qwen2_5_vl", "qwen3")


def check_type(model_type: str, key: str) -> None:
    """Refuse a model whose layers have no kernels here. Raises ConfigError; `key` names the setting."""
    if model_type not in MODEL_TYPES:
        raise ConfigError(f"{key}=True is for {', '.join(MODEL_TYPES)} models, not for {model_type}: set it to False")


def apply(hf: PreTrainedModel) -> None:
    """Give the layers of this model Liger's forward pass. Weights and their names stay."""
    library = importlib.import_module("liger_kernel.transformers")  # only GPU environments have it
    # It also replaces the classes that models loaded later would be made of: those of other roles, which did not ask.
    classes = vars(sys.modules[type(hf).__module__])
    before = dict(classes)
    library._apply_liger_kernel_to_instance(
        hf, rope=False, cross_entropy=False, fused_linear_cross_entropy=False, rms_norm=True, swiglu=True
    )
    classes.update(before)
