"""One of several ranks: sequence parallel attention, policy and value model against the same on this rank alone.

The exchange is also held against DeepSpeed's `DistributedAttention`, the implementation of Ulysses' authors.
Started by `test_ulysses.py` as `python ulysses_rank.py TEXT_FOLDER VISION_FOLDER STORE_FILE RANK SIZE`; exits with an
error when they differ.
"""

import io
import sys
from collections.abc import Callable

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from PIL import Image
from torch import Tensor, nn
from torch.nn import Identity
from torch.nn.functional import pad, scaled_dot_product_attention

from vrl.models.attention import AttentionPlans, varlen_attention
from vrl.models.loading import load_policy, load_value_model
from vrl.models.packing import PackedBatch, pack, with_shared_prompts
from vrl.models.policy import CausalPolicy
from vrl.models.renderer import load_renderer
from vrl.models.token_log_probs import Extra
from vrl.models.ulysses import SequenceGroup, heads_to_tokens, tokens_to_heads
from vrl.models.value import ValueModel
from vrl.protocol.balance import RowPrompt

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
Row = tuple[str, list[bytes]]


def _noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _png(height: int, width: int) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def check_exchange(sequence: SequenceGroup) -> None:
    """There and back is the identity; in between a rank has all tokens of its heads."""
    size, tokens, width = sequence.size, 9, 3
    query, key = _noise(1, 1, 4, tokens, width), _noise(2, 1, 2, tokens, width)
    mine = [sequence.slice(x[0].transpose(0, 1)).transpose(0, 1)[None] for x in (query, key, key + 1)]
    q, k, v = tokens_to_heads(*mine, sequence, tokens)
    heads = 4 // size
    torch.testing.assert_close(q, query[:, sequence.rank * heads : (sequence.rank + 1) * heads], rtol=0, atol=0)
    torch.testing.assert_close(k, key[:, [sequence.rank * 2 // size]], rtol=0, atol=0)
    torch.testing.assert_close(v, k + 1, rtol=0, atol=0)
    back = heads_to_tokens(q.transpose(1, 2), sequence)
    torch.testing.assert_close(back, mine[0].transpose(1, 2), rtol=0, atol=0)


def check_refusal(sequence: SequenceGroup) -> None:
    query, key = _noise(1, 1, 3, 2, 4), _noise(2, 1, 1, 2, 4)
    with pytest.raises(ValueError, match="3 query and 1 key-value heads"):
        tokens_to_heads(query, key, key, sequence, 2 * sequence.size)


def check_attention(sequence: SequenceGroup, lengths: tuple[int, ...], kv_heads: int, window: int | None) -> None:
    """Output and gradients of a rank's slice are the slice of those of all tokens."""
    tokens = sum(lengths)
    cu_seqlens = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    shared = {"cu_seq_lens_q": cu_seqlens, "max_length_q": max(lengths), "sliding_window": window}
    inputs = [_noise(seed, tokens, heads, 8) for seed, heads in enumerate((4, kv_heads, kv_heads))]
    weights = _noise(7, tokens, 4, 8)

    def run(plans: AttentionPlans, given: list[Tensor], factor: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in given]
        heads_first = (x.transpose(0, 1)[None] for x in leaves)
        out, _ = varlen_attention(Identity(), *heads_first, None, vrl_plans=plans, **shared)
        return (out[0].detach(), *torch.autograd.grad((out[0] * factor).sum(), leaves))

    wanted = run(AttentionPlans(lengths), inputs, weights)
    found = run(AttentionPlans(lengths, sequence), [sequence.slice(x) for x in inputs], sequence.slice(weights))
    torch.testing.assert_close(found, tuple(sequence.slice(x) for x in wanted), **CLOSE)


def check_exchange_against_deepspeed(sequence: SequenceGroup, lengths: tuple[int, ...], kv_heads: int) -> None:
    """Output and gradients of a rank's slice, filling included, are DeepSpeed's around plain attention row by row."""
    tokens = sum(lengths)
    inputs = [sequence.slice(_noise(seed, tokens, heads, 8)) for seed, heads in enumerate((4, kv_heads, kv_heads))]
    factor = sequence.slice(_noise(7, tokens, 4, 8))
    cu_seqlens = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    shared = {"cu_seq_lens_q": cu_seqlens, "max_length_q": max(lengths)}

    def row_by_row(*whole: Tensor) -> Tensor:  # [1, size * t, heads, D]
        filling = whole[0].shape[1] - tokens
        rows = zip(*(x.transpose(1, 2).split([*lengths, filling], dim=2) for x in whole), strict=True)
        parts = [scaled_dot_product_attention(*row, is_causal=True, enable_gqa=True) for row in list(rows)[:-1]]
        return pad(torch.cat(parts, dim=2).transpose(1, 2), (0, 0, 0, 0, 0, filling))

    def theirs(*leaves: Tensor) -> Tensor:
        attention = DistributedAttention(row_by_row, sequence.group, scatter_idx=2, gather_idx=1)
        return attention(*(x[None] for x in leaves), batch_dim_idx=0)[0]

    def ours(*leaves: Tensor) -> Tensor:
        heads_first = (x.transpose(0, 1)[None] for x in leaves)
        plans = AttentionPlans(lengths, sequence)
        return varlen_attention(Identity(), *heads_first, None, vrl_plans=plans, **shared)[0][0]

    def run(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attend(*leaves)
        return (out.detach(), *torch.autograd.grad((out * factor).sum(), leaves))

    torch.testing.assert_close(run(ours), run(theirs), rtol=1e-6, atol=1e-6)


def _batch(folder: str, rows: list[Row], sequence: SequenceGroup | None) -> PackedBatch:
    renderer = load_renderer(folder)
    cache = renderer.image_cache(1 << 30)
    ids = [renderer.expand(renderer.render([{"role": "user", "content": text}]), images) for text, images in rows]
    flat, offsets = torch.tensor([token for row in ids for token in row]), torch.tensor([0, *map(len, ids)]).cumsum(0)
    if cache is None:
        return pack(flat, offsets, sequence=sequence)
    places = [torch.tensor(renderer.positions(row, images)) for row, (_, images) in zip(ids, rows, strict=True)]
    pixels, grids = cache.batch([image for _, images in rows for image in images])
    return pack(
        flat,
        offsets,
        positions=torch.cat(places),
        pixel_values=pixels,
        image_grid_thw=grids,
        sequence=sequence,
    )


def _outputs(model: nn.Module, packed: PackedBatch) -> list[Tensor]:
    if isinstance(model, ValueModel):
        return [model(packed)]
    assert isinstance(model, CausalPolicy)
    wanted = torch.arange(len(packed.input_ids)) % 5 != 0
    outputs = model(packed, temperature=0.8, want=Extra.ENTROPY, chunk_tokens=16, positions=wanted)
    assert outputs.entropy is not None
    return [outputs.log_probs, outputs.entropy]


def _run(model: nn.Module, packed: PackedBatch) -> tuple[list[Tensor], dict[str, Tensor]]:
    model.zero_grad()
    outputs = _outputs(model, packed)
    # Not linear in the results, so that a rank which lacked those of the others would have another gradient.
    torch.stack([x * _noise(5, len(x)) for x in outputs]).sum().square().backward()
    return [x.detach() for x in outputs], {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _sharing(folder: str, packed: PackedBatch) -> PackedBatch:
    """Return a batch whose second half repeats the first so that all but the last tokens of a row are its prompt."""
    lengths = packed.cu_seqlens.diff().tolist()
    half = len(lengths) // 2
    prompts = [RowPrompt(i % half, n - 3) for i, n in enumerate(lengths)]
    return with_shared_prompts(packed, prompts, load_renderer(folder).image_token)


def check_model(model: nn.Module, folder: str, rows: list[Row], sequence: SequenceGroup) -> None:
    """Results are whole on every rank; the ranks' gradients add up to those of one process. So with shared prompts."""
    compare_model(model, _batch(folder, rows, None), _batch(folder, rows, sequence), sequence)
    twice = [*rows, *rows]
    compare_model(model, _batch(folder, twice, None), _sharing(folder, _batch(folder, twice, sequence)), sequence)


def compare_model(model: nn.Module, whole: PackedBatch, sliced: PackedBatch, sequence: SequenceGroup) -> None:
    wanted, wanted_grads = _run(model, whole)
    found, grads = _run(model, sliced)
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert grads.keys() == wanted_grads.keys()
    for name, grad in grads.items():
        dist.all_reduce(grad, group=sequence.group)
        scale = float(wanted_grads[name].abs().max())
        torch.testing.assert_close(grad, wanted_grads[name], rtol=1e-5, atol=max(1e-5 * scale, 1e-7), msg=name)


def check_image_on_the_border(folder: str, rows: list[Row], sequence: SequenceGroup) -> None:
    """An image begins in the first rank's slice and ends in the second's, also where prompts are computed once."""
    shared = _sharing(folder, _batch(folder, [*rows, *rows], None)).compact
    assert shared is not None
    for packed in (_batch(folder, rows, None), shared.batch):
        border = sequence.share(len(packed.input_ids))
        assert (packed.input_ids[border - 1 : border + 1] == load_renderer(folder).image_token).all()


def check_models(text: str, vision: str, sequence: SequenceGroup) -> None:
    plain: list[Row] = [("how many cells are there", []), ("no", []), ("count the blue cells " * 3, [])]
    images: list[Row] = [
        ("how many cells are there", []),
        ("<image> or <image>", [_png(84, 56), _png(30, 200)]),
        ("<image> which colour", [_png(60, 90)]),
    ]
    check_image_on_the_border(vision, images, sequence)
    for folder, batches in ((text, [plain]), (vision, [images, plain])):
        for load in (load_policy, load_value_model):
            model = load(folder, torch.float32, gradient_checkpointing=True)
            for rows in batches:
                check_model(model, folder, rows, sequence)


def check_single_tokens(text: str, sequence: SequenceGroup) -> None:
    """Fewer tokens than ranks: a rank then has nothing but filling."""
    model = load_policy(text, torch.float32)
    ids, offsets = torch.tensor([20]), torch.tensor([0, 1])
    outputs = model(pack(ids, offsets, sequence=sequence), want=Extra.ENTROPY)
    assert outputs.log_probs.tolist() == [0.0]
    outputs.log_probs.sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def check_other_attention(text: str, sequence: SequenceGroup) -> None:
    model = load_policy(text, torch.float32, attn="sdpa")
    with pytest.raises(ValueError, match="varlen"):
        model(pack(torch.arange(20, 30), torch.tensor([0, 10]), sequence=sequence))


def main() -> None:
    text, vision, store, rank, size = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    sequence = SequenceGroup(dist.group.WORLD)
    check_exchange(sequence)
    check_refusal(sequence)
    for lengths in ((7, 1, 12), (3, 3, 2), (1,), (25,)):
        for kv_heads in (4, 2, 1):
            check_attention(sequence, lengths, kv_heads, None)
    check_attention(sequence, (9, 14), 2, 5)
    deepspeed.ops.__compatible_ops__ = {}  # or it would compile, for a minute, collectives that are not used here
    deepspeed.init_distributed("gloo")  # takes over the group that is there
    for kv_heads in (4, 2):
        if kv_heads >= size:  # DeepSpeed does not repeat key-value heads
            check_exchange_against_deepspeed(sequence, (7, 1, 12), kv_heads)
            check_exchange_against_deepspeed(sequence, (9, 14), kv_heads)
    if size == 2:
        check_models(text, vision, sequence)
        check_other_attention(text, sequence)
    check_single_tokens(text, sequence)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
