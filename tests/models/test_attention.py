"""The packed attention function against dense attention of each row alone."""

import pytest
import torch
from torch import Tensor
from torch.nn import Identity
from torch.nn.functional import scaled_dot_product_attention

from vrl.models.attention import AttentionPlans, Run, plan_runs, varlen_attention

_ROWS = (7, 7, 1, 30, 12, 12, 12, 3)


def _inputs(heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(_ROWS)
    sizes = (heads, kv_heads, kv_heads)
    q, k, v = (torch.randn(1, total, h, 8, generator=generator).transpose(1, 2).requires_grad_() for h in sizes)
    return q, k, v


def _row_by_row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    parts = []
    for a, b, c in zip(*(x.split(_ROWS, dim=2) for x in (q, k, v)), strict=True):
        length = a.shape[2]
        step = torch.arange(length)
        allowed = torch.ones(length, length, dtype=torch.bool)
        if causal:
            allowed &= step[:, None] >= step
        if window is not None:
            allowed &= step[:, None] - step < window
        b, c = (x.repeat_interleave(groups, dim=1) for x in (b, c))
        parts.append(scaled_dot_product_attention(a, b, c, attn_mask=allowed, scale=0.3))
    return torch.cat(parts, dim=2).transpose(1, 2)


@pytest.mark.parametrize(
    ("kv_heads", "causal", "window"), [(4, True, None), (2, True, None), (1, True, 5), (4, False, None)]
)
def test_packed_rows_attend_only_to_themselves(kv_heads: int, causal: bool, window: int | None) -> None:
    q, k, v = _inputs(4, kv_heads)
    wanted = _row_by_row(q, k, v, causal=causal, window=window)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    wanted_grads = torch.autograd.grad((wanted * weights).sum(), (q, k, v))
    cu_seqlens = torch.tensor((0, *_ROWS)).cumsum(0).to(torch.int32)
    found, _ = varlen_attention(
        Identity(), q, k, v, None, vrl_plans=AttentionPlans(_ROWS), cu_seq_lens_q=cu_seqlens, max_length_q=max(_ROWS),
        scaling=0.3, is_causal=causal, sliding_window=window,
    )  # fmt: skip
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    found_grads = torch.autograd.grad((found * weights).sum(), (q, k, v))
    torch.testing.assert_close(found_grads, wanted_grads, rtol=1e-5, atol=1e-5)


_PROMPTS = (5, 9)
_REMAINDERS = ((0, 4), (1, 1), (0, 4), (1, 12), (0, 7))  # the prompt, and the tokens that follow it


@pytest.mark.parametrize(("kv_heads", "window"), [(4, None), (2, None), (1, 3), (2, 8), (2, 50)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_remainders_look_at_their_prompt(kv_heads: int, window: int | None, dtype: torch.dtype, bound: float) -> None:
    """Each remainder as the end of a row that has the prompt's tokens as its begin; gradients of the prompt add up."""
    segments = [*_PROMPTS, *(n for _, n in _REMAINDERS)]
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(1, heads, sum(segments), 8, generator=generator, dtype=dtype).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]
    tokens = torch.arange(sum(segments)).split(segments)
    rows = [*tokens[:2], *(torch.cat([tokens[p], own]) for (p, _), own in zip(_REMAINDERS, tokens[2:], strict=True))]
    wanted = []
    for row, own in zip(rows, tokens, strict=True):
        q, k, v = (x.index_select(2, row) for x in leaves)
        k, v = (x.repeat_interleave(4 // kv_heads, dim=1) for x in (k, v))
        distance = torch.arange(len(row))[:, None] - torch.arange(len(row))
        allowed = (distance >= 0) & (distance < (window or 100))
        out = scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=0.3)
        wanted.append(out[:, :, -len(own) :])
    whole = torch.cat(wanted, dim=2).transpose(1, 2)
    plans = AttentionPlans(segments, key_lengths=[len(row) for row in rows], keys=torch.cat(rows))
    found, _ = varlen_attention(
        Identity(), *leaves, None, vrl_plans=plans, cu_seq_lens_q=torch.tensor([0, *segments]).cumsum(0).int(),
        max_length_q=max(segments), scaling=0.3, sliding_window=window,
    )  # fmt: skip
    torch.testing.assert_close(found, whole, rtol=bound, atol=bound)
    weights = torch.randn(whole.shape, generator=generator, dtype=dtype)
    grads = [torch.autograd.grad((x * weights).sum(), leaves) for x in (found, whole)]
    torch.testing.assert_close(*grads, rtol=bound, atol=bound)


def test_equal_neighbours_run_together() -> None:
    assert plan_runs(_ROWS) == (Run(2, 7, 7), Run(1, 1, 1), Run(1, 30, 30), Run(3, 12, 12), Run(1, 3, 3))
    assert plan_runs((0, 4, 0, 4)) == (Run(2, 4, 4),)
    assert plan_runs((4, 4, 4), (4, 9, 9)) == (Run(1, 4, 4), Run(2, 4, 9))


def test_windows_are_planned_once() -> None:
    plans = AttentionPlans((5,))
    windows = torch.tensor([0, 4, 8, 10], dtype=torch.int32)
    assert plans.windows(windows) == (Run(2, 4, 4), Run(1, 2, 2))
    assert plans.windows(windows) is plans.windows(windows)


def test_what_it_cannot_do_is_refused() -> None:
    q, k, v = _inputs(4, 4)
    plans = AttentionPlans(_ROWS)
    cu_seqlens = torch.tensor((0, *_ROWS)).cumsum(0).to(torch.int32)
    with pytest.raises(ValueError, match="attn='sdpa'"):
        varlen_attention(Identity(), q, k, v, None, scaling=0.3)
    with pytest.raises(ValueError, match="softcap"):
        varlen_attention(Identity(), q, k, v, None, vrl_plans=plans, cu_seq_lens_q=cu_seqlens, softcap=30.0)
    with pytest.raises(ValueError, match="dropout"):
        varlen_attention(Identity(), q, k, v, None, vrl_plans=plans, cu_seq_lens_q=cu_seqlens, dropout=0.1)
