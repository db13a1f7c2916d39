"""The value model: a backbone with a scalar head. Made by `loading.load_value_model`, trained by the critic."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, final

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from vrl.models import backbone, lora
from vrl.models.packing import PackedBatch
from vrl.protocol.errors import DataError

MARKER_FILE: Final = "value_model.json"
HEAD_FILE: Final = "value_head.safetensors"
_FORMAT: Final = "vrl-value-model-1"
_HEAD_PREFIX: Final = "value_head."
_HEAD_STD: Final = 0.02


@final
class ValueModel(nn.Module):
    """`values[t]` is the value of the prefix before t: the head's output at t-1, 0 at the first token of a row.

    No temperature is involved. The head computes in float32 whatever the backbone's dtype.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = base
        width = base.config.get_text_config().hidden_size
        self.value_head = nn.Linear(width, 1, dtype=torch.float32)
        # A generator of its own: every rank makes the same head, and the global one is left alone.
        nn.init.normal_(self.value_head.weight, std=_HEAD_STD, generator=torch.Generator().manual_seed(0))
        nn.init.zeros_(self.value_head.bias)

    def forward(self, packed: PackedBatch) -> Float[Tensor, " T"]:
        """Return one value a token."""
        hidden = backbone.hidden_states(self.backbone, packed)
        scores = linear(hidden.float(), self.value_head.weight.float(), self.value_head.bias.float())
        index, before = backbone.predicted_here(packed)
        return backbone.by_token(packed, index, scores[before, 0])

    def decoder_layers(self) -> Sequence[nn.Module]:
        """Return the decoder's layers, to shard one by one."""
        return backbone.decoder_layers(self.backbone)

    def vision_blocks(self) -> Sequence[nn.Module]:
        """Return the vision tower's blocks; none for text models."""
        return backbone.vision_blocks(self.backbone)

    def hf_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter under its name in a saved folder: the backbone's own, and `value_head.*`.

        With adapters on the backbone the names are peft's; `lora.merged` makes the saved ones of them.
        """
        yield from self.backbone.named_parameters()
        for name, parameter in self.value_head.named_parameters():
            yield _HEAD_PREFIX + name, parameter

    def save_pretrained(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the backbone as a Hugging Face folder, the head and a marker beside it.

        Args:
            folder: made when missing.
            weights: full tensors by the names of `hf_named_parameters` (as gathered from shards), adapters merged;
                its own by default.
        """
        if weights is None:
            weights = dict(lora.merged(self.backbone, self.hf_named_parameters(), iter))
        full = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        head = {name: full.pop(name) for name in list(full) if name.startswith(_HEAD_PREFIX)}
        self.backbone.save_pretrained(folder, state_dict=full)
        save_file(head, folder / HEAD_FILE)
        (folder / MARKER_FILE).write_text(
            json.dumps({"format": _FORMAT, "head": sorted(head)}) + "\n", encoding="utf-8"
        )

    def load_head(self, folder: Path) -> bool:
        """Read the head of a folder that `save_pretrained` wrote; returns False for a plain backbone.

        Raises:
            DataError: the folder holds a part of a value model, or a head of another shape.
        """
        marker, file = folder / MARKER_FILE, folder / HEAD_FILE
        if not marker.is_file() and not file.is_file():
            return False
        if not (marker.is_file() and file.is_file()):
            lost = HEAD_FILE if marker.is_file() else MARKER_FILE
            raise DataError(f"{folder} is an incomplete value model: {lost} is missing; save it again")
        written = json.loads(marker.read_text(encoding="utf-8")).get("format")
        if written != _FORMAT:
            raise DataError(f"{marker} says format {written!r}, this version reads {_FORMAT!r}")
        found = {name.removeprefix(_HEAD_PREFIX): tensor for name, tensor in load_file(file).items()}
        wanted = self.value_head.state_dict()
        shapes = {name: tuple(t.shape) for name, t in found.items()}
        if shapes != {name: tuple(t.shape) for name, t in wanted.items()}:
            raise DataError(
                f"{file} holds {shapes}, which is no head of a backbone of width {wanted['weight'].shape[1]}"
            )
        self.value_head.load_state_dict(found)
        return True
