"""Resource pools: Ray placement groups that hold one bundle a rank, node by node."""

import socket
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
    ranks_per_node: int
    nodes: int
    gpus: bool
    cpus_per_rank: int

    @property
    def world_size(self) -> int:
        """Processes on all machines together."""
        return self.ranks_per_node * self.nodes


@final
class ResourcePool:
    """A pool's placement groups, one a node, kept together on it."""

    def __init__(self, spec: PoolSpec, timeout_seconds: float) -> None:
        """Reserve the pool. Raises ConfigError when the cluster has not got that much, before anything starts."""
        self.spec = spec
        _check_available(spec)
        bundle: dict[str, float] = {"CPU": float(spec.cpus_per_rank)}
        if spec.gpus:
            bundle["GPU"] = 1.0
        self.groups: list[PlacementGroup] = [
            placement_group([bundle] * spec.ranks_per_node, strategy="STRICT_PACK") for _ in range(spec.nodes)
        ]
        ready, late = ray.wait(
            [group.ready() for group in self.groups], num_returns=len(self.groups), timeout=timeout_seconds
        )
        if late:
            self.release()
            raise ConfigError(
                f"pool {spec.name!r} got {len(ready)} of {spec.nodes} nodes within {timeout_seconds:g} s; lower "
                "trainer.nnodes or trainer.n_gpus_per_node, or wait until the cluster is free"
            )

    def place(self, rank: int) -> tuple[PlacementGroup, int]:
        """Return the placement group and bundle of a rank."""
        node, local = divmod(rank, self.spec.ranks_per_node)
        return self.groups[node], local

    def release(self) -> None:
        """Give the reservation back to the cluster; Ray kills what still runs in it."""
        for group in self.groups:
            remove_placement_group(group)


def free_port() -> int:
    """Return a port that is free on this machine now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _check_available(spec: PoolSpec) -> None:
    total = ray.cluster_resources()
    kind, have = ("GPU", total.get("GPU", 0.0)) if spec.gpus else ("CPU", total.get("CPU", 0.0))
    need = spec.world_size * (1 if spec.gpus else spec.cpus_per_rank)
    if have < need:
        raise ConfigError(
            f"trainer.nnodes={spec.nodes} x trainer.n_gpus_per_node={spec.ranks_per_node} asks for {need} {kind}s, but "
            f"the cluster has {int(have)}; set trainer.n_gpus_per_node={max(1, int(have) // max(spec.nodes, 1))}"
        )
