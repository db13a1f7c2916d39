"""Log-probs of next tokens, and more of their distribution, without ever keeping the logits. Used by `CausalPolicy`.

Full logits of 32k tokens and 152k words take 18 GiB in float32. Here a chunk of tokens at a time goes through the head,
and the backward pass computes each chunk's logits again: memory is one chunk's, whatever the length.
"""

from enum import Flag, auto
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Extra(Flag):
    """What is wanted of a token's distribution beside the log-prob."""

    NONE = 0
    ENTROPY = auto()
    SUM_PI_SQUARED = auto()


class TokenStatistics(NamedTuple):
    """Of each target: its log-prob, and of its distribution the entropy and the sum of squared probabilities."""

    log_probs: Float[Tensor, " N"]
    entropy: Float[Tensor, " N"] | None
    sum_pi_squared: Float[Tensor, " N"] | None


def token_log_probs(
    hidden: Float[Tensor, "N W"],
    head: tuple[Float[Tensor, "V W"], Float[Tensor, " V"] | None],
    targets: Int[Tensor, " N"],
    *,
    shift: Float[Tensor, " V"] | None = None,
    temperature: float = 1.0,
    want: Extra = Extra.NONE,
    chunk_tokens: int = 1024,
) -> TokenStatistics:
    """Return each target's log-prob under `softmax((hidden @ weight.T + bias + shift) / temperature)`, and more of it.

    The head's product runs in the head's dtype, everything after it in float32, as in vLLM (`processed_logprobs`: bias
    first, then temperature). Log-prob and entropy are differentiable in `hidden`, the head's weight and its bias.

    Args:
        hidden: what goes into the head, one row a wanted token.
        head: its weight and bias.
        targets: the tokens whose log-probs are wanted.
        shift: added to the logits, such as -100 on banned tokens.
        temperature: of sampling; > 0.
        want: the entropy in nats, the sum over the vocabulary of p^2 (without gradient); None where not asked for.
        chunk_tokens: tokens whose logits exist at a time.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} has no log-probs; it must be above 0 (0 is for evaluation only)")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1")
    settings = (temperature, want, chunk_tokens)
    log_probs, entropy, squares = _TokenLogProbs.apply(hidden, *head, shift, targets, settings)
    return TokenStatistics(
        log_probs, entropy if Extra.ENTROPY in want else None, squares if Extra.SUM_PI_SQUARED in want else None
    )


def _scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, shift: Tensor | None, temperature: float
) -> Float[Tensor, "C V"]:
    logits = (hidden.to(weight.dtype) @ weight.T).float()
    for added in (bias, shift):
        if added is not None:
            logits += added
    return logits.div_(temperature) if temperature != 1.0 else logits


@final
class _TokenLogProbs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shift: Tensor | None,
        targets: Tensor,
        settings: tuple[float, Extra, int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        temperature, want, chunk = settings
        log_probs = hidden.new_zeros(len(hidden), dtype=torch.float32)
        log_norm = torch.zeros_like(log_probs)
        entropy = torch.zeros_like(log_probs) if Extra.ENTROPY in want else log_probs.new_zeros(0)
        squares = torch.zeros_like(log_probs) if Extra.SUM_PI_SQUARED in want else log_probs.new_zeros(0)
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            logits = _scaled_logits(hidden[part], weight, bias, shift, temperature)
            # Taking the maximum off first keeps a large common offset out of the entropy.
            top = logits.amax(dim=-1, keepdim=True)
            logits -= top
            norm = logits.logsumexp(dim=-1)
            log_probs[part] = logits.gather(1, targets[part, None])[:, 0] - norm
            log_norm[part] = norm + top[:, 0]
            if want:
                logits -= norm[:, None]
            if Extra.ENTROPY in want:
                entropy[part] = _entropy(logits)
            if Extra.SUM_PI_SQUARED in want:
                squares[part] = logits.mul_(2.0).exp_().sum(dim=-1)
            del logits
        ctx.save_for_backward(hidden, weight, bias, shift, targets, log_norm, entropy)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(squares)
        return log_probs, entropy, squares

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: None = None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, shift, targets, log_norm, entropy = ctx.saved_tensors
        temperature, _want, chunk = ctx.settings
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            logs = _scaled_logits(hidden[part], weight, bias, shift, temperature).sub_(log_norm[part, None])
            grad = _grad_logits(
                logs,
                targets[part],
                None if grad_log_probs is None else grad_log_probs[part],
                None if grad_entropy is None else (grad_entropy[part], entropy[part]),
            )
            if temperature != 1.0:
                grad /= temperature
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            low = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = (low @ weight).to(hidden.dtype)
            if grad_weight is not None:
                _add_product(grad_weight, low.T, hidden[part].to(weight.dtype))
            del logs, grad, low  # else they live on beside the next chunk's logits
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _entropy(logs: Float[Tensor, "C V"]) -> Float[Tensor, " C"]:
    """Return -sum p log p; words of probability zero count as 0. Minus infinity in `logs` becomes the lowest number."""
    probs = logs.exp()
    return -probs.mul_(logs.clamp_(min=torch.finfo(logs.dtype).min)).sum(dim=-1)


def _grad_logits(
    logs: Float[Tensor, "C V"],
    targets: Int[Tensor, " C"],
    grad_log_probs: Float[Tensor, " C"] | None,
    entropy: tuple[Float[Tensor, " C"], Float[Tensor, " C"]] | None,
) -> Float[Tensor, "C V"]:
    """Return the gradient at the scaled logits: g (onehot - p) for the log-prob, -g p (log p + H) for the entropy.

    It takes the place of `logs`: beside them a chunk is in memory once more at most, and only for the entropy.
    """
    if entropy is None:
        assert grad_log_probs is not None, "autograd calls for a gradient of something"
        grad = logs.exp_().mul_(-grad_log_probs[:, None])
    else:
        outer, value = entropy
        probs = logs.exp()
        grad = logs.clamp_(min=torch.finfo(logs.dtype).min).add_(value[:, None]).mul_(probs).mul_(-outer[:, None])
        if grad_log_probs is not None:
            grad.addcmul_(probs, grad_log_probs[:, None], value=-1.0)
    if grad_log_probs is not None:
        grad.scatter_add_(1, targets[:, None], grad_log_probs[:, None])
    return grad


def _add_product(total: Float[Tensor, "V W"], left: Tensor, right: Tensor) -> None:
    """Add left @ right to a float32 sum, so that many chunks lose nothing to bfloat16."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += left @ right
