"""The policy: a causal language model (with or without images) that returns log-probs of a packed batch.

Actor and reference wrap a model in it, shard `decoder_layers()`, `vision_blocks()` and the policy itself with FSDP2,
and call it. Everything down to the log-probs happens inside `forward`, because only there are the root's parameters
(embeddings and head) whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from vrl.models import backbone
from vrl.models.packing import PackedBatch
from vrl.models.token_log_probs import Extra, token_log_probs

BAN_SHIFT: Final = -100.0  # vLLM's lowest logit_bias; added to a logit, it is no minus infinity


@final
@dataclass(frozen=True, slots=True, eq=False)
class TokenOutputs:
    """`log_probs[t]`, `entropy[t]` (nats) and `sum_pi_squared[t]` belong to token t given those before it.

    They are 0 at positions that were not asked for.
    """

    log_probs: Float[Tensor, " T"]
    entropy: Float[Tensor, " T"] | None
    sum_pi_squared: Float[Tensor, " T"] | None


@final
class CausalPolicy(nn.Module):
    """A Hugging Face causal language model or Qwen2.5-VL, behind log-probs of packed rows."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    def forward(
        self,
        packed: PackedBatch,
        *,
        temperature: float = 1.0,
        banned_ids: Sequence[int] = (),
        want: Extra = Extra.NONE,
        chunk_tokens: int = 1024,
        positions: Bool[Tensor, " T"] | None = None,
    ) -> TokenOutputs:
        """Return log-probs under the distribution the engine samples from: `log_softmax((logits + ban) / temperature)`.

        Args:
            packed: the rows.
            temperature: of sampling; > 0.
            banned_ids: tokens whose logits are lowered by 100, as in the engine.
            want: what else of the same distribution is returned. It costs no memory.
            chunk_tokens: tokens whose logits exist at a time.
            positions: the tokens whose log-probs are wanted; all by default. The first token of a row never has one.
        """
        hidden = backbone.hidden_states(self.hf.base_model, packed)
        index, before = backbone.predicted_here(packed, positions)
        head: Any = self.hf.get_output_embeddings()  # a linear layer; the library's type allows for none
        found = token_log_probs(
            hidden[before],
            (head.weight, head.bias),
            packed.input_ids[index],
            shift=_ban(banned_ids, head.weight),
            temperature=temperature,
            want=want,
            chunk_tokens=chunk_tokens,
        )
        log_probs, entropy, squares = (None if x is None else backbone.by_token(packed, index, x) for x in found)
        assert log_probs is not None
        return TokenOutputs(log_probs=log_probs, entropy=entropy, sum_pi_squared=squares)

    def decoder_layers(self) -> Sequence[nn.Module]:
        """Return the decoder's layers, to shard one by one."""
        return backbone.decoder_layers(self.hf.base_model)

    def vision_blocks(self) -> Sequence[nn.Module]:
        """Return the vision tower's blocks; none for text models."""
        return backbone.vision_blocks(self.hf.base_model)

    def hf_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once under its Hugging Face state-dict name; a tied head comes as the embedding only.

        With adapters the names are peft's; `lora.merged` makes those of the model without them.
        """
        yield from self.hf.named_parameters()


def _ban(banned_ids: Sequence[int], weight: Tensor) -> Float[Tensor, " V"] | None:
    if not banned_ids:
        return None
    if not 0 <= min(banned_ids) <= max(banned_ids) < len(weight):
        raise ValueError(f"banned_ids {tuple(banned_ids)} go beyond the vocabulary of {len(weight)} tokens")
    shift = torch.zeros(len(weight), device=weight.device)
    shift[list(banned_ids)] = BAN_SHIFT
    return shift
