"""FSDP2 over a policy or value model, and full parameters back out of it for the engine."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard


class Shardable(Protocol):
    """What a model of `models/` offers for sharding."""

    def decoder_layers(self) -> Sequence[nn.Module]:
        """Return the decoder's layers, to shard one by one."""
        ...

    def vision_blocks(self) -> Sequence[nn.Module]:
        """Return the vision tower's blocks; none for text models."""
        ...


def shard(module: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, dtype: torch.dtype, reshard: bool) -> None:
    """Shard each block, then the rest as the root.

    Master weights keep their dtype (float32), computation runs in `dtype`.
    """
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else mixed
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)


def full_parameters(named: Iterable[tuple[str, nn.Parameter]], bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """Yield full parameters by name, gathered in buckets of about `bucket_bytes` by one all-gather each.

    Every rank must exhaust the iterator in step with the others. Tensors are valid until the next bucket is asked for.
    """
    bucket: list[tuple[str, DTensor]] = []
    size = 0
    for name, parameter in named:
        data = parameter.detach()
        if not isinstance(data, DTensor):
            yield name, data
            continue
        if not isinstance(data.placements[-1], Shard) or data.placements[-1].dim != 0:
            yield name, data.full_tensor()
            continue
        if bucket and (size + data.nbytes > bucket_bytes or data.dtype != bucket[0][1].dtype):
            yield from _gather(bucket)
            bucket, size = [], 0
        bucket.append((name, data))
        size += data.nbytes
    if bucket:
        yield from _gather(bucket)


def _gather(bucket: Sequence[tuple[str, DTensor]]) -> Iterator[tuple[str, Tensor]]:
    """One all-gather for all tensors of a bucket; each is sharded on its first axis in chunks of ceil(rows / ranks)."""
    mesh = bucket[0][1].device_mesh
    group = mesh.get_group(mesh.ndim - 1)
    ranks = dist.get_world_size(group)
    pieces = []
    for _, tensor in bucket:
        local = tensor.to_local()
        rows = tensor.shape[0]
        # In plain numbers: slicing the sharded tensor itself would cost more than the gather.
        chunk = -(-rows // ranks) * (tensor.numel() // rows) if rows else 0
        flat = local.new_zeros(chunk)
        flat[: local.numel()] = local.reshape(-1)
        pieces.append(flat)
    mine = torch.cat(pieces)
    everyone = mine.new_empty(ranks * len(mine))
    dist.all_gather_single(everyone, mine, group=group)
    by_rank = everyone.view(ranks, len(mine))
    start = 0
    for (name, tensor), piece in zip(bucket, pieces, strict=True):
        rows = by_rank[:, start : start + len(piece)].reshape(-1)[: tensor.numel()]
        start += len(piece)
        yield name, rows.view(tensor.shape)
