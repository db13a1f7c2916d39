"""The pools of a run and the processes in them: which role lives where, built all at once, ended together."""

from collections.abc import Sequence
from typing import final

from vrl.controller.calls import Calls
from vrl.controller.resource_pool import PoolSpec, free_ports, reserve
from vrl.controller.worker_group import ProcessGroup, WorkerGroup
from vrl.protocol.config.pool_rules import pool_section
from vrl.protocol.config.schema import Config
from vrl.workers.host import RunLength

SHARED = "global"  # the pool of actor, rollout and all roles without one of their own


def pool_specs(config: Config, gpus: bool) -> list[PoolSpec]:
    """Return the pool that actor and rollout share, then those of roles that have one of their own, named by them.

    Actor and rollout are always together, because weights are resharded within their processes.
    """
    trainer = config.trainer
    sizes = [(SHARED, trainer.n_gpus_per_node, trainer.nnodes)]
    sizes += [(role, pool.n_gpus_per_node, pool.nnodes) for role, pool in config.own_pools.items()]
    specs: list[PoolSpec] = []
    first_core = 0
    for name, ranks_per_node, nodes in sizes:
        spec = PoolSpec(
            name=name,
            section=pool_section(name),
            ranks_per_node=ranks_per_node,
            nodes=nodes,
            gpus=gpus,
            cpus_per_rank=trainer.cpu_threads_per_rank,
            first_core=first_core,
        )
        specs.append(spec)
        first_core += ranks_per_node * spec.cpus_per_rank
    return specs


@final
class Pools:
    """The worker processes of a run, those of all pools."""

    def __init__(self, specs: Sequence[PoolSpec], config: Config) -> None:
        """Reserve all pools, then start all processes; they come up side by side.

        Raises ConfigError when the cluster has not got that much.
        """
        self._calls = Calls()
        pools = reserve(specs, config.trainer.worker_start_timeout)
        self._groups = {
            pool.spec.name: ProcessGroup(pool, config, self._calls, port)
            for pool, port in zip(pools, free_ports(len(pools)), strict=True)
        }

    def build(self, roles: Sequence[str], length: RunLength, config: Config) -> dict[str, WorkerGroup]:
        """Build roles, in order within a pool and in all pools at once; return a handle for each.

        A role that is there already is replaced.
        """
        homes: dict[str, list[str]] = {}
        for role in roles:
            homes.setdefault(role if role in self._groups else SHARED, []).append(role)
        calls = [call for name, here in homes.items() for call in self._groups[name].start_build(here, length, config)]
        self._calls.results(calls, f"building {', '.join(roles)}")
        return {
            role: WorkerGroup(
                self._groups[name], role, config.sequence_parallel_size(role), config.shares_prompts(role)
            )
            for name, here in homes.items()
            for role in here
        }

    def close(self) -> None:
        """End all processes, in order where they still answer."""
        for group in self._groups.values():
            group.start_close()
        for group in self._groups.values():
            group.close()

    def kill(self) -> None:
        """End all processes now, whatever they are doing, and give the pools back."""
        for group in self._groups.values():
            group.kill()
