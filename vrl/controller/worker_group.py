"""Worker groups: the processes of a pool, and each role in them as one object whose methods run on all ranks.

`pools.Pools` makes the groups of a run.

The driver calls `group.call(method, batch, ...)`; the method's own declaration says how rows are cut and joined.

    driver --share of rows--> rank 0..n-1 (WorkerHost: actor, critic, reference, rollout in one process)
           <--rows, metrics--
"""

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast, final

import ray
import torch
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vrl.controller.calls import Calls, Place
from vrl.controller.resource_pool import PoolSpec, ResourcePool, free_port
from vrl.protocol.balance import RowPrompt
from vrl.protocol.columns import GROUP, INPUT_IDS, MINI_BATCH, UID
from vrl.protocol.config.schema import Config
from vrl.protocol.dataproto import DataProto, concat
from vrl.protocol.dispatch import (
    Dispatch,
    MethodSpec,
    check_columns,
    from_ranks,
    method_spec,
    mini_batch_shares,
    row_shares,
    to_ranks,
)
from vrl.protocol.errors import WorkerError
from vrl.protocol.metrics import reduce_metrics
from vrl.protocol.rows import group_prompts
from vrl.workers.host import ROLE_CLASSES, RunLength, WorkerHost
from vrl.workers.process import RankPlace, environment

_CLOSE_SECONDS = 10.0


@final
class ProcessGroup:
    """The worker processes of one pool. They meet at `port` when all are on this machine."""

    def __init__(self, pool: ResourcePool, config: Config, calls: Calls, port: int) -> None:
        self.pool = pool
        self.calls = calls
        self.closing: list[Any] = []
        spec = pool.spec
        device = "cuda" if spec.gpus else "cpu"
        env = dict(environment(device, spec.cpus_per_rank))
        if not spec.gpus:
            env |= _allocator()
        host = ray.remote(WorkerHost)
        address, port = _rendezvous(pool, port)
        self.handles: list[ActorHandle] = []
        for rank in range(spec.world_size):
            group, bundle = pool.place(rank)
            place = RankPlace(
                rank=rank,
                world_size=spec.world_size,
                local_rank=rank % spec.ranks_per_node,
                local_world_size=spec.ranks_per_node,
                master_address=address,
                master_port=port,
                device=device,
                cores=() if spec.gpus else cores(spec, rank % spec.ranks_per_node, sorted(os.sched_getaffinity(0))),
                threads=spec.cpus_per_rank,
            )
            options = host.options(
                num_cpus=spec.cpus_per_rank,
                num_gpus=1 if spec.gpus else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
                runtime_env={"env_vars": env},
                max_restarts=0,
            )
            # Ray types what it returns as handle or class, for completion in editors; it is a handle.
            self.handles.append(cast(ActorHandle, options.remote(place, config)))
            calls.watch(self.place(rank), self.handles[-1])

    def place(self, rank: int) -> Place:
        """Return the name of a process."""
        return Place(self.pool.spec.name, rank)

    def start_build(self, roles: Sequence[str], length: RunLength, config: Config) -> list[tuple[Place, Any]]:
        """Let every process build roles, in order, in place of those that are there; return the calls."""
        return [
            (self.place(rank), handle.build.remote(list(roles), length, config))
            for rank, handle in enumerate(self.handles)
        ]

    def start_close(self) -> None:
        """Let all processes end in order."""
        self.closing = [handle.close.remote() for handle in self.handles]

    def close(self) -> None:
        """Wait for the processes to end, and end those that do not answer."""
        try:
            ray.wait(self.closing, num_returns=len(self.closing), timeout=_CLOSE_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """End all processes now, whatever they are doing, and give the pool back."""
        for handle in self.handles:
            ray.kill(handle)
        self.pool.release()


@final
class WorkerGroup:
    """One role on all ranks of a process group."""

    def __init__(self, processes: ProcessGroup, role: str, ranks_a_share: int, share_prompts: bool) -> None:
        self._processes = processes
        self._class = ROLE_CLASSES[role]
        self._ranks_a_share = ranks_a_share
        self._share_prompts = share_prompts
        self.role = role

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return len(self._processes.handles)

    @property
    def data_parallel_size(self) -> int:
        """Shares that rows are cut into: ranks that share sequences count as one."""
        return self.world_size // self._ranks_a_share

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a registered method on all ranks.

        The first argument of a row method is the batch. Rows come back in the caller's order; metrics are merged.
        """
        return self.start(method, *arguments)()

    def start(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Send a call off; return what waits for its result. A process takes its calls in the order they were sent."""
        spec = method_spec(self._class, method)
        if spec.dispatch is Dispatch.ALL:
            return self._send(method, [arguments] * self.world_size)
        batch, *others = arguments
        check_columns(spec, batch)
        if spec.dispatch is Dispatch.ROWS:
            return self._rows(spec, method, batch, others)
        return self._mini_batches(method, batch, others)

    def _rows(self, spec: MethodSpec, method: str, batch: DataProto, others: list[Any]) -> Callable[[], DataProto]:
        lengths = batch.ragged(INPUT_IDS).lengths.tolist()
        shares = row_shares(lengths, self.data_parallel_size, self._prompts(batch))
        parts = self._send_shares(method, [(batch.rows(share), *others) for share in shares])
        return lambda: _in_order(spec, parts(), shares)

    def _mini_batches(self, method: str, batch: DataProto, others: list[Any]) -> Callable[[], dict[str, float]]:
        lengths = batch.ragged(INPUT_IDS).lengths.tolist()
        groups = batch.dense(GROUP) if GROUP in batch else None
        ranks, prompts = self.data_parallel_size, self._prompts(batch)
        shares = mini_batch_shares(batch.dense(MINI_BATCH), lengths, ranks, groups, prompts)
        slim = batch.drop([MINI_BATCH])
        parts = self._send_shares(method, [(slim.rows(share.rows), share.steps, *others) for share in shares])
        return lambda: reduce_metrics(parts())

    def _prompts(self, batch: DataProto) -> list[RowPrompt] | None:
        # Lessons of supervised training belong to no group.
        return group_prompts(batch) if self._share_prompts and UID in batch else None

    def _send_shares(self, method: str, arguments: Sequence[Sequence[Any]]) -> Callable[[], list[Any]]:
        results = self._send(method, to_ranks(arguments, self._ranks_a_share))
        return lambda: from_ranks(results(), self._ranks_a_share)

    def _send(self, method: str, arguments: Sequence[Sequence[Any]]) -> Callable[[], list[Any]]:
        calls = [
            (self._processes.place(rank), handle.call.remote(self.role, method, *given))
            for rank, (handle, given) in enumerate(zip(self._processes.handles, arguments, strict=True))
        ]
        return partial(self._processes.calls.results, calls, f"{self.role}.{method}")


def _in_order(spec: MethodSpec, parts: Sequence[DataProto], shares: Sequence[Sequence[int]]) -> DataProto:
    """Return the rows of all shares in the caller's order."""
    order = torch.tensor([row for share in shares for row in share])
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    result = concat(parts).rows(back)
    absent = set(spec.returns) - result.names()
    if absent:
        raise WorkerError(f"{spec.name} declares that it returns {sorted(absent)}, but did not")
    return result


def _rendezvous(pool: ResourcePool, port: int) -> tuple[str, int]:
    """Return address and port of rank 0's machine for the process group; `port` is free on this one."""
    if pool.spec.nodes == 1:
        return "127.0.0.1", port
    group, bundle = pool.place(0)
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    probe = ray.remote(_address_and_port).options(num_cpus=0, scheduling_strategy=strategy)
    return ray.get(probe.remote())


def _address_and_port() -> tuple[str, int]:
    return ray.util.get_node_ip_address(), free_port()


def _allocator() -> dict[str, str]:
    """Return the variables that give a worker the jemalloc of Ray's wheel, where there is one.

    Tensors of ever other sizes leave holes in glibc's heap, and a worker grows by a few MiB a step. With jemalloc it
    stays flat. Pages go back after 20 s: those kept for good are never joined to larger ones, and to take them anew
    every step would cost a tenth of the time.
    """
    library = Path(ray.__file__).parent / "core" / "libjemalloc.so"
    if not library.is_file():
        return {}
    given = os.environ.get("LD_PRELOAD")
    settings = "narenas:1,dirty_decay_ms:20000,muzzy_decay_ms:20000,oversize_threshold:0,thp:always"
    return {"LD_PRELOAD": f"{library}:{given}" if given else str(library), "MALLOC_CONF": settings}


def cores(spec: PoolSpec, local_rank: int, allowed: Sequence[int]) -> tuple[int, ...]:
    """Return the cores of a rank: neighbours among the `allowed` ones, after those of the pools before.

    None where there are too few left: such a process is not bound.
    """
    first = spec.first_core + local_rank * spec.cpus_per_rank
    chosen = allowed[first : first + spec.cpus_per_rank]
    return tuple(chosen) if len(chosen) == spec.cpus_per_rank else ()


def start_ray(config: Config, gpus: bool) -> None:
    """Start Ray here, or join the cluster of `ray_kwargs.ray_init.address`."""
    settings = config.ray_kwargs.ray_init
    if settings.address is not None:
        ray.init(address=settings.address, logging_level=logging.ERROR, log_to_driver=False)
        return
    ranks = config.ranks_per_node * config.trainer.cpu_threads_per_rank
    ray.init(
        num_cpus=settings.num_cpus or max(ranks, len(os.sched_getaffinity(0))),
        # Batches only pass through; Ray's default of 30 % of the memory is far too much beside models on a laptop.
        object_store_memory=None if gpus else _OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,  # what workers print stands in Ray's own log files; their errors reach the driver
        logging_level=logging.ERROR,
    )


_OBJECT_STORE_BYTES = 512 * 2**20
