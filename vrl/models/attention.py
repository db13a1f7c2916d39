"""Self-attention of packed rows without a T x T mask: one registered attention function for text and vision layers.

Segments of different length stand behind one another in a sequence. Each is a row and may look only at itself, or what
follows a prompt that several rows share, and looks at the prompt, too. On a GPU in half precision torch's
variable-length flash kernel does it. Elsewhere each run of neighbours of equal width is one call.
(Padding rows of similar length to a common width was measured, too: on a CPU it costs more than the calls it saves.)
`packing.pack` makes the plans, `backbone` passes them along, `loading` selects the function by its name.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from vrl.models.ulysses import SequenceGroup, heads_to_tokens, tokens_to_heads

VARLEN_ATTENTION: Final = "vrl_varlen"
# Qwen2.5-VL's vision blocks hand a function whole sequences with their bounds only if "flash" is in its name; others
# are called once a window, hundreds of times an image.
VARLEN_VISION_ATTENTION: Final = "vrl_varlen_flash"
PLANS_KEYWORD: Final = "vrl_plans"


@final
@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring segments of equal width that look at equally many keys: they run as one call."""

    rows: int
    width: int
    keys: int

    @property
    def size(self) -> int:
        """Return the number of tokens."""
        return self.rows * self.width

    @property
    def keys_size(self) -> int:
        """Return the number of keys of all segments together."""
        return self.rows * self.keys


@final
@dataclass(frozen=True, slots=True, eq=False)
class GatheredKeys:
    """The tokens that segments look at, where these are more than themselves: `index`, cut by `cu_seqlens`."""

    index: Int[Tensor, " K"]
    cu_seqlens: Int[Tensor, " S1"]
    longest: int

    @classmethod
    def of(cls, index: Int[Tensor, " K"], lengths: Sequence[int]) -> "GatheredKeys":
        """Cut an index by lengths."""
        return cls(index, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), max(lengths))

    def to(self, device: torch.device | str) -> "GatheredKeys":
        """Return them on another device."""
        index, cu_seqlens = (x.to(device, non_blocking=True) for x in (self.index, self.cu_seqlens))
        return GatheredKeys(index, cu_seqlens, self.longest)


@final
class AttentionPlans:
    """How a packed batch is attended to: the runs of its segments, and those of each set of vision windows, made once.

    Made by `packing.pack`; travels through the model's keyword arguments to every layer. `sequence` is set where the
    decoder holds a slice of the `tokens`, `keys` where segments look at more than themselves; vision layers always hold
    theirs as a whole.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        sequence: SequenceGroup | None = None,
        *,
        key_lengths: Sequence[int] | None = None,
        keys: Int[Tensor, " K"] | None = None,
    ) -> None:
        self.runs = plan_runs(lengths, key_lengths)
        self.tokens = sum(lengths)
        self.sequence = sequence
        self.keys = None if keys is None or key_lengths is None else GatheredKeys.of(keys, key_lengths)
        # The tensor is kept beside its plan so that its id cannot be given to another one.
        self._windows: dict[int, tuple[Tensor, tuple[Run, ...]]] = {}

    def to(self, device: torch.device | str) -> "AttentionPlans":
        """Return the plans with their keys on another device."""
        moved = copy(self)
        moved.keys = None if self.keys is None else self.keys.to(device)
        return moved

    def windows(self, cu_seqlens: Int[Tensor, " N"]) -> tuple[Run, ...]:
        """Return the runs of a vision tower's windows or images."""
        key = id(cu_seqlens)
        if key not in self._windows:
            self._windows[key] = (cu_seqlens, plan_runs(cu_seqlens.diff().tolist()))
        return self._windows[key][1]


def plan_runs(lengths: Sequence[int], key_lengths: Sequence[int] | None = None) -> tuple[Run, ...]:
    """Join neighbours of equal length and equally many keys; segments without a token are left out."""
    widths = groupby((n, k) for n, k in zip(lengths, key_lengths or lengths, strict=True) if n)
    return tuple(Run(len(list(same)), width, keys) for (width, keys), same in widths)


def varlen_attention(
    module: nn.Module,  # noqa: ARG001 - transformers passes it first
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 KV T D"],
    value: Float[Tensor, "1 KV T D"],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 T H D"], None]:
    """Attend within each row of a packed sequence; transformers calls this in every layer.

    Reads from `kwargs`: `vrl_plans` (AttentionPlans), `cu_seq_lens_q` (int32 `[B+1]`), `max_length_q`, `scaling`,
    `is_causal` (False in vision blocks) and `sliding_window`.

    Raises:
        ValueError: called without plans or with something that it does not implement (mask, dropout, sinks, soft cap).
    """
    plans: AttentionPlans | None = kwargs.get(PLANS_KEYWORD)
    if plans is None or attention_mask is not None:
        raise ValueError(
            f"attention {VARLEN_ATTENTION!r} runs packed batches only (keyword {PLANS_KEYWORD}, no mask); "
            "load the model with attn='sdpa' to call it in another way"
        )
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown or kwargs.get("dropout"):
        raise ValueError(f"attention {VARLEN_ATTENTION!r} does not implement {', '.join(unknown) or 'dropout'}")
    causal = kwargs.get("is_causal") is not False
    sequence = plans.sequence if causal else None
    if sequence is None:
        return _attend_packed((query, key, value), plans, kwargs, causal=causal), None
    whole = tokens_to_heads(query, key, value, sequence, plans.tokens)
    return heads_to_tokens(_attend_packed(whole, plans, kwargs, causal=True), sequence), None


def _attend_packed(
    inputs: tuple[Tensor, Tensor, Tensor], plans: AttentionPlans, kwargs: Mapping[str, Any], *, causal: bool
) -> Float[Tensor, "1 T H D"]:
    query, key, value = inputs
    window = kwargs.get("sliding_window") if causal else None
    cu_seqlens = kwargs["cu_seq_lens_q"]
    scale = kwargs.get("scaling")
    gathered = plans.keys if causal else None
    if gathered is not None:
        key, value = (x.index_select(2, gathered.index) for x in (key, value))
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        longest = kwargs["max_length_q"]
        cu_keys, longest_keys = (cu_seqlens, longest) if gathered is None else (gathered.cu_seqlens, gathered.longest)
        reach = (-1 if window is None else window - 1, 0) if causal else (-1, -1)  # counted from the last key back
        grouped = query.shape[1] != key.shape[1]
        out: Any = varlen_attn(
            q, k, v, cu_seqlens, cu_keys, longest, longest_keys, scale=scale, window_size=reach, enable_gqa=grouped
        )
        return out[None]
    runs = plans.runs if causal else plans.windows(cu_seqlens)
    # One split, not a slice a run: the backward pass of a slice fills a whole sequence with zeros.
    queries = query.split([run.size for run in runs], dim=2)
    keys, values = (x.split([run.keys_size for run in runs], dim=2) for x in (key, value))
    pieces = zip(queries, keys, values, strict=True)
    parts = [_attend(run, piece, scale, causal=causal, window=window) for run, piece in zip(runs, pieces, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend(
    run: Run, piece: tuple[Tensor, Tensor, Tensor], scale: float | None, *, causal: bool, window: int | None
) -> Float[Tensor, "1 N H D"]:
    q, k, v = piece
    grouped = q.shape[1] != k.shape[1]
    if run.rows > 1:
        q, k, v = (x[0].unflatten(1, (run.rows, -1)).transpose(0, 1) for x in piece)
    mask = None
    if causal and (run.keys > run.width or (window is not None and window < run.keys)):
        mask = _mask(run, window, q.device)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=grouped
    ).transpose(1, 2)
    return out.reshape(1, run.size, *out.shape[2:]) if run.rows > 1 else out


def _mask(run: Run, window: int | None, device: torch.device) -> Bool[Tensor, "N K"]:
    """Return which keys a segment's queries see: those up to itself, and of these the last `window` ones."""
    step = torch.arange(run.keys, device=device)
    distance = step[-run.width :, None] - step
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


AttentionInterface.register(VARLEN_ATTENTION, varlen_attention)
AttentionInterface.register(VARLEN_VISION_ATTENTION, varlen_attention)
