"""Resource pools: Ray placement groups that hold one bundle a rank, node by node."""

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import final

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from vrl.protocol.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """What a pool asks for: `ranks_per_node` processes on each of `nodes` machines, each with a GPU or CPU cores."""

    name: str
    section: str  # of the settings that give its size, for messages
    ranks_per_node: int
    nodes: int
    gpus: bool
    cpus_per_rank: int
    first_core: int = 0  # of a CPU: the cores before it belong to other pools

    @property
    def world_size(self) -> int:
        """Processes on all machines together."""
        return self.ranks_per_node * self.nodes


@final
class ResourcePool:
    """A pool's placement groups, one a node, kept together on it."""

    def __init__(self, spec: PoolSpec) -> None:
        """Ask for the pool; `reserve` waits until it is there."""
        self.spec = spec
        bundle: dict[str, float] = {"CPU": float(spec.cpus_per_rank)}
        if spec.gpus:
            bundle["GPU"] = 1.0
        self.groups: list[PlacementGroup] = [
            placement_group([bundle] * spec.ranks_per_node, strategy="STRICT_PACK") for _ in range(spec.nodes)
        ]

    def place(self, rank: int) -> tuple[PlacementGroup, int]:
        """Return the placement group and bundle of a rank."""
        node, local = divmod(rank, self.spec.ranks_per_node)
        return self.groups[node], local

    def release(self) -> None:
        """Give the reservation back to the cluster; Ray kills what still runs in it."""
        for group in self.groups:
            remove_placement_group(group)


def reserve(specs: Sequence[PoolSpec], timeout_seconds: float) -> list[ResourcePool]:
    """Reserve all pools of a run or none.

    Raises ConfigError when the cluster has not got that much, before anything starts.
    """
    check_cluster(specs)
    pools = [ResourcePool(spec) for spec in specs]
    ready = {group.ready(): pool.spec for pool in pools for group in pool.groups}
    _, late = ray.wait(list(ready), num_returns=len(ready), timeout=timeout_seconds)
    if late:
        for pool in pools:
            pool.release()
        spec = ready[late[0]]
        missing = sum(ready[ref].name == spec.name for ref in late)
        raise ConfigError(
            f"pool {spec.name!r} got {spec.nodes - missing} of {spec.nodes} nodes within {timeout_seconds:g} s; lower "
            f"{spec.section}.nnodes or {spec.section}.n_gpus_per_node, or wait until the cluster is free"
        )
    return pools


def check_cluster(specs: Sequence[PoolSpec]) -> None:
    """Raise ConfigError when the cluster is smaller than all pools together."""
    check_size(specs, int(ray.cluster_resources().get("GPU" if specs[0].gpus else "CPU", 0.0)))


def check_size(specs: Sequence[PoolSpec], have: int) -> None:
    """Raise ConfigError when `have` GPUs (or CPU cores) are too few for all pools together."""
    gpus = specs[0].gpus
    kind = "GPU" if gpus else "CPU"
    units = [1 if gpus else spec.cpus_per_rank for spec in specs]
    need = sum(spec.world_size * unit for spec, unit in zip(specs, units, strict=True))
    if have >= need:
        return
    wanted = " + ".join(
        f"{spec.section}.nnodes={spec.nodes} x {spec.section}.n_gpus_per_node={spec.ranks_per_node}" for spec in specs
    )
    first = specs[0]
    left = have - sum(spec.world_size * unit for spec, unit in zip(specs[1:], units[1:], strict=True))
    fits = max(1, left // (first.nodes * units[0]))
    raise ConfigError(
        f"{wanted} asks for {need} {kind}s, but the cluster has {have}; set {first.section}.n_gpus_per_node={fits}"
        + (" or smaller pools" if left < first.nodes * units[0] else "")
    )


def free_port() -> int:
    """Return a port that is free on this machine now."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return ports, all different, that are free on this machine now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
