"""Which pools a run has, what they take of a machine, and what is said when that is too much."""

from typing import Any

import pytest

from vrl.controller.pools import pool_specs
from vrl.controller.resource_pool import check_size, free_ports
from vrl.controller.worker_group import cores
from vrl.protocol.config.builder import build
from vrl.protocol.config.schema import Config
from vrl.protocol.errors import ConfigError


def config_of(**trainer: Any) -> Config:
    pool = {"enable": True, "n_gpus_per_node": 2, "nnodes": 2}
    return build(
        {
            "algorithm": {"adv_estimator": "gae"},
            "trainer": {"n_gpus_per_node": 3, **trainer},
            "critic": {"resource_pool": pool},
            "reward_model": {"enable": True, "resource_pool": {"enable": True}},
            "actor_rollout_ref": {"ref": {"resource_pool": pool}},  # this run has no reference
        }
    )


def test_every_role_with_a_pool_of_its_own_gets_one():
    specs = pool_specs(config_of(), gpus=True)
    assert [(spec.name, spec.world_size) for spec in specs] == [("global", 3), ("critic", 4), ("reward_model", 1)]
    assert [spec.section for spec in specs] == ["trainer", "critic.resource_pool", "reward_model.resource_pool"]


def test_no_two_processes_of_a_machine_share_a_core_while_there_are_enough():
    specs = pool_specs(config_of(cpu_threads_per_rank=2), gpus=False)
    bound = [cores(spec, rank, range(10, 24)) for spec in specs for rank in range(spec.ranks_per_node)]
    assert bound == [(10, 11), (12, 13), (14, 15), (16, 17), (18, 19), (20, 21)]
    # Too few: the first pools keep their cores, the rest is not bound.
    bound = [cores(spec, rank, range(7)) for spec in specs for rank in range(spec.ranks_per_node)]
    assert bound == [(0, 1), (2, 3), (4, 5), (), (), ()]


def test_a_cluster_must_hold_all_pools_together():
    specs = pool_specs(config_of(cpu_threads_per_rank=2), gpus=False)
    check_size(specs, 16)
    with pytest.raises(ConfigError) as error:
        check_size(specs, 15)
    for part in (
        "trainer.nnodes=1 x trainer.n_gpus_per_node=3 + critic.resource_pool.nnodes=2 x "
        "critic.resource_pool.n_gpus_per_node=2",
        "asks for 16 CPUs, but the cluster has 15",
        "set trainer.n_gpus_per_node=2",
    ):
        assert part in str(error.value)
    check_size(pool_specs(config_of(cpu_threads_per_rank=2), gpus=True), 8)
    with pytest.raises(ConfigError, match=r"asks for 8 GPUs, but the cluster has 5.* or smaller pools"):
        check_size(pool_specs(config_of(), gpus=True), 5)


def test_ports_are_all_different():
    assert len(set(free_ports(50))) == 50
