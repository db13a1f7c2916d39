"""The variable-length flash kernel with more keys than queries, against dense attention in float32."""

import pytest
import torch
from torch.nn import Identity
from torch.nn.functional import scaled_dot_product_attention

from vrl.models.attention import AttentionPlans, varlen_attention

PROMPTS = (130, 64)
REMAINDERS = ((0, 40), (1, 1), (0, 257), (1, 64), (0, 40))  # the prompt, and the tokens that follow it


@pytest.mark.parametrize("window", [None, 32, 150])
def test_remainders_look_at_their_prompt(window: int | None) -> None:
    """The kernel's causal mask is aligned to the last key, so is its window; gradients of a prompt add up."""
    segments = [*PROMPTS, *(n for _, n in REMAINDERS)]
    draw = torch.Generator().manual_seed(0)
    exact = [torch.randn(1, heads, sum(segments), 64, generator=draw).cuda().requires_grad_() for heads in (8, 2, 2)]
    half = [x.detach().bfloat16().requires_grad_() for x in exact]
    tokens = torch.arange(sum(segments)).split(segments)
    rows = [*tokens[:2], *(torch.cat([tokens[p], own]) for (p, _), own in zip(REMAINDERS, tokens[2:], strict=True))]
    wanted = []
    for row, own in zip(rows, tokens, strict=True):
        q, k, v = (x.index_select(2, row.cuda()) for x in exact)
        k, v = (x.repeat_interleave(4, dim=1) for x in (k, v))
        step = torch.arange(len(row), device="cuda")
        distance = step[:, None] - step
        allowed = (distance >= 0) & (distance < (window or len(row)))
        wanted.append(scaled_dot_product_attention(q, k, v, attn_mask=allowed)[:, :, -len(own) :])
    whole = torch.cat(wanted, dim=2).transpose(1, 2)
    plans = AttentionPlans(segments, key_lengths=[len(row) for row in rows], keys=torch.cat(rows)).to("cuda")
    found, _ = varlen_attention(
        Identity(), *half, None, vrl_plans=plans, cu_seq_lens_q=torch.tensor([0, *segments]).cumsum(0).int().cuda(),
        max_length_q=max(segments), sliding_window=window,
    )  # fmt: skip
    torch.testing.assert_close(found.float(), whole, rtol=2e-2, atol=2e-2)
    weights = torch.randn(whole.shape, generator=draw).cuda()
    wanted_grads = torch.autograd.grad((whole * weights).sum(), exact)
    grads = torch.autograd.grad((found * weights).sum(), half)
    for grad, right in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(grad.float(), right, rtol=5e-2, atol=2e-2 * float(right.abs().max()))
