"""Sets up one rank's process: environment, core binding, threads, process group. Called first thing in a worker.

`environment()` must be in the process's environment before torch and vLLM are imported (Ray's runtime environment,
torchrun's parent); `start()` does the rest.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vrl.models.ulysses import SequenceGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank stands."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int
    device: str  # "cpu" or "cuda"
    cores: tuple[int, ...] = ()  # CPU cores this process may use; empty: all
    threads: int = 1  # of torch's CPU operators
    timeout_seconds: int = 600


def environment(device: str, threads: int) -> Mapping[str, str]:
    """Return variables that must be set before torch and vLLM are imported in a worker process."""
    shared = {
        # Idle threads that spin take the core from the other rank: one step took up to 20 times as long.
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
    }
    if device == "cpu":
        # transformers loads DeepSpeed when it saves a model, and that warns where it finds no GPU by itself.
        shared |= {"DS_ACCELERATOR": "cpu"}
        # The engine compiles its log-prob function at first use: 18 s for what eager mode does in no time on a CPU.
        shared |= {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "1"}
    return shared


def start(place: RankPlace) -> None:
    """Bind cores, set threads and join the default process group."""
    if place.cores:
        # The only binding that works in-process: the engine's own setting is read by its multi-process executor alone.
        os.sched_setaffinity(0, place.cores)
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(device_index(place.local_rank)),  # the engine takes it for the number of its device
        LOCAL_WORLD_SIZE=str(place.local_world_size),
        MASTER_ADDR=place.master_address,
        MASTER_PORT=str(place.master_port),
    )
    if place.device == "cuda":
        torch.cuda.set_device(device_index(place.local_rank))
    else:
        torch.set_num_threads(place.threads)
    backend = "gloo" if place.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=place.timeout_seconds),
    )


def device_index(local_rank: int) -> int:
    """Return which of the GPUs that this process sees is its own: Ray shows each its one, torchrun shows them all."""
    visible = torch.cuda.device_count()
    return local_rank % visible if visible else local_rank


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def fsdp_mesh(device: str, fsdp_size: int) -> DeviceMesh:
    """Return the sharding mesh: one axis, or (replicate, shard) when `fsdp_size` is smaller than the world."""
    world = dist.get_world_size()
    if fsdp_size in (-1, 0) or fsdp_size >= world:
        return init_device_mesh(device, (world,), mesh_dim_names=("fsdp",))
    return init_device_mesh(device, (world // fsdp_size, fsdp_size), mesh_dim_names=("ddp", "fsdp"))


@final
@dataclass(frozen=True, slots=True)
class LearnerRanks:
    """How the ranks of a learner share its rows.

    `sequence` are the ranks that hold the same rows and share their tokens (None: this rank alone). `data` has one rank
    of each such group, this one among them: together they hold every row once (None: all ranks).
    """

    sequence: SequenceGroup | None = None
    data: dist.ProcessGroup | None = None


def learner_ranks(device: str, sequence_parallel_size: int) -> LearnerRanks:
    """Return the groups of neighbouring ranks that share rows; all ranks call this together."""
    if sequence_parallel_size == 1:
        return LearnerRanks()
    shape = (dist.get_world_size() // sequence_parallel_size, sequence_parallel_size)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "sequence"))
    return LearnerRanks(SequenceGroup(mesh.get_group("sequence")), mesh.get_group("data"))
