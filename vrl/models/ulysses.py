"""Ulysses sequence parallelism (arXiv 2309.14509): the ranks of a group share the tokens of one packed batch.

Ids, positions and images are whole on every rank, and so is the vision tower. From the embeddings to the hidden states
a rank holds a slice of the tokens; attention alone needs rows as a whole, and swaps tokens for heads and back:

    packed tokens T, filled up with zeros to size * t
    rank r:  [H, t, D]  --all-to-all-->  [H / size, T, D]  attend  --all-to-all-->  [H, t, D]

`attention` calls the exchange, `backbone` slices, policy and value model join their results, `workers.process` makes
the groups.
"""

from typing import Any, final

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad


@final
class SequenceGroup:
    """The ranks that share the tokens of a packed batch, and this rank's place among them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def share(self, tokens: int) -> int:
        """Return the tokens of a slice, filling included: equal on all ranks, 1 or more."""
        return -(-tokens // self.size)

    def begin(self, tokens: int) -> int:
        """Return where this rank's slice begins; beyond the last token where the slice is nothing but filling."""
        return self.rank * self.share(tokens)

    def slice(self, whole: Shaped[Tensor, "T ..."]) -> Shaped[Tensor, "N ..."]:
        """Return this rank's tokens, filled up with zeros."""
        begin, share = self.begin(len(whole)), self.share(len(whole))
        return _filled(whole[begin : begin + share], share)

    def join(self, partial: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return the sum over the ranks of results that are zero but for a rank's own tokens.

        All ranks go on to compute the same loss from it. A rank's backward pass starts from the gradient of its own
        tokens alone: the sum of the ranks' parameter gradients is then that of one loss.
        """
        return _Join.apply(partial, self)

    def exchange(self, outgoing: Float[Tensor, "S N C"]) -> Float[Tensor, "S N C"]:
        """Send part i of the first axis to rank i; return the parts received, in the order of ranks."""
        return _Exchange.apply(outgoing, self)


def tokens_to_heads(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 KV N D"],
    value: Float[Tensor, "1 KV N D"],
    sequence: SequenceGroup,
    tokens: int,
) -> tuple[Float[Tensor, "1 HR T D"], Float[Tensor, "1 KVR T D"], Float[Tensor, "1 KVR T D"]]:
    """Return all tokens of this rank's heads from all heads of this rank's tokens, in one exchange.

    Fewer key-value heads than ranks are repeated to one a rank, and no further: neighbouring ranks hold the same one.

    Raises:
        ValueError: the heads cannot be spread over the ranks.
    """
    size = sequence.size
    query_heads, kv_heads = query.shape[1], key.shape[1]
    if query_heads % size or (kv_heads % size and size % kv_heads):
        raise ValueError(f"{query_heads} query and {kv_heads} key-value heads cannot be spread over {size} ranks")
    if kv_heads < size:
        key, value = (x.repeat_interleave(size // kv_heads, dim=1) for x in (key, value))
    # [N, heads * D] by receiver; what arrives is then the sequence itself, with no axis to swap.
    parts = [x[0].transpose(0, 1).reshape(x.shape[2], size, -1) for x in (query, key, value)]
    received = sequence.exchange(torch.cat(parts, dim=-1).transpose(0, 1)).flatten(0, 1)[:tokens]
    columns = received.split([part.shape[-1] for part in parts], dim=-1)
    q, k, v = (
        column.unflatten(-1, (-1, x.shape[-1])).transpose(0, 1)[None]
        for column, x in zip(columns, (query, key, value), strict=True)
    )
    return q, k, v


def heads_to_tokens(out: Float[Tensor, "1 T HR D"], sequence: SequenceGroup) -> Float[Tensor, "1 N H D"]:
    """Return all heads of this rank's tokens from all tokens of this rank's heads."""
    _, tokens, _, width = out.shape
    share = sequence.share(tokens)
    outgoing = _filled(out[0].flatten(1), share * sequence.size).unflatten(0, (sequence.size, share))
    received = sequence.exchange(outgoing).transpose(0, 1)  # heads lie in the order of ranks
    return received.reshape(1, share, -1, width)


def _filled(part: Shaped[Tensor, "M ..."], length: int) -> Shaped[Tensor, "N ..."]:
    missing = length - len(part)
    return pad(part, (*(0, 0) * (part.ndim - 1), 0, missing)) if missing else part


@final
class _Exchange(Function):
    """All-to-all. What rank s gets from r as part r left r as part s, so the backward pass is the same exchange."""

    @staticmethod
    def forward(ctx: Any, outgoing: Tensor, sequence: SequenceGroup) -> Tensor:
        ctx.sequence = sequence
        return _all_to_all(outgoing, sequence)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.sequence), None


def _all_to_all(outgoing: Tensor, sequence: SequenceGroup) -> Tensor:
    outgoing = outgoing.contiguous()
    received = torch.empty_like(outgoing)
    dist.all_to_all_single(received, outgoing, group=sequence.group)
    return received


@final
class _Join(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, sequence: SequenceGroup) -> Tensor:  # noqa: ARG004 - autograd passes it
        joined = partial.clone()
        dist.all_reduce(joined, group=sequence.group)
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 - autograd passes it
        return grad, None
