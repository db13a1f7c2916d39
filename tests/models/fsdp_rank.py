"""One of two ranks: gradients of sharded models, one rank with text only, against those of a single process.

Started by `test_fsdp.py` as `python fsdp_rank.py FOLDER STORE_FILE RANK`; exits with an error when they differ.
"""

import io
import sys
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vrl.models.loading import load_policy, load_value_model
from vrl.models.packing import PackedBatch, pack
from vrl.models.policy import CausalPolicy
from vrl.models.renderer import load_renderer
from vrl.models.token_log_probs import Extra
from vrl.models.value import ValueModel

Model = CausalPolicy | ValueModel


def _png(height: int, width: int) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def _batch(folder: str, rows: list[tuple[str, list[bytes]]]) -> PackedBatch:
    renderer = load_renderer(folder)
    cache = renderer.image_cache(1 << 30)
    assert cache is not None
    ids = [renderer.expand(renderer.render([{"role": "user", "content": text}]), images) for text, images in rows]
    places = [torch.tensor(renderer.positions(row, images)) for row, (_, images) in zip(ids, rows, strict=True)]
    pixels, grids = cache.batch([image for _, images in rows for image in images])
    offsets = torch.tensor([0, *map(len, ids)]).cumsum(0)
    return pack(
        torch.tensor([token for row in ids for token in row]),
        offsets,
        positions=torch.cat(places),
        pixel_values=pixels,
        image_grid_thw=grids,
    )


def _loss(model: Model, packed: PackedBatch) -> Tensor:
    if isinstance(model, ValueModel):
        return (model(packed) - 0.5).square().sum()
    outputs = model(packed, temperature=0.8, want=Extra.ENTROPY, chunk_tokens=16)
    return outputs.log_probs.sum() + 0.1 * outputs.entropy.sum()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


def _sharded(model: Model, precision: MixedPrecisionPolicy) -> Model:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model.decoder_layers(), *model.vision_blocks()):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def _check_bfloat16(load: Callable[[], Model], share: PackedBatch) -> None:
    """Master weights in float32, compute in bfloat16: outputs stay float32 and near the exact ones."""
    exact = load()(share)
    outputs = _sharded(load(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))(share)
    wanted, found = (x if isinstance(x, Tensor) else x.log_probs for x in (exact, outputs))
    assert found.dtype == torch.float32
    assert 0 < (found - wanted).abs().mean() < 0.02
    found.sum().backward()


def _check(load: Callable[[], Model], shares: list[PackedBatch], rank: int) -> None:
    alone = load()
    for share in shares:
        _loss(alone, share).backward()
    wanted = _gradients(alone)
    model = _sharded(load(), MixedPrecisionPolicy())
    # Twice, as in gradient accumulation; FSDP averages over the ranks.
    for _ in range(2):
        (_loss(model, shares[rank]) * len(shares) / 2).backward()
    found = _gradients(model)
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def main() -> None:
    """Compare policy and value model, with a trained and a frozen vision tower, and in bfloat16."""
    folder, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    text = [("how many cells are there", []), ("no", [])]
    images = [("<image> which colour", [_png(60, 90)]), ("<image> or <image>", [_png(84, 56), _png(30, 200)])]
    shares = [_batch(folder, text), _batch(folder, images)]
    for frozen in (False, True):
        for load in (load_policy, load_value_model):
            _check(
                lambda load=load, frozen=frozen: load(
                    folder, torch.float32, gradient_checkpointing=True, freeze_vision_tower=frozen
                ),
                shares,
                rank,
            )
    for load in (load_policy, load_value_model):
        _check_bfloat16(lambda load=load: load(folder, torch.float32), shares[rank])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
