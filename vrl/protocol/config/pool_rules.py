"""Rules of ranks: parallel sizes against the pool that a role lives in, and pools without a role. `rules` runs them."""

from collections.abc import Iterator

from vrl.protocol.config.schema import Config

_ACTOR, _ROLLOUT, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
SECTIONS = {"reference": _REF, "critic": "critic", "reward_model": "reward_model"}

Messages = Iterator[str]


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit`."""
    return next(size for size in range(min(limit, number), 0, -1) if number % size == 0)


def pool_section(role: str) -> str:
    """Return the section that holds the size of a role's own pool; of any other role, that of all the others."""
    return f"{SECTIONS[role]}.resource_pool" if role in SECTIONS else "trainer"


def parallel(config: Config) -> Messages:
    """Sequence-parallel, tensor-parallel and shard-group sizes must divide the ranks of the role's pool."""
    actor = config.actor_rollout_ref.actor
    shared = ("actor", f"{_ACTOR}.ulysses_sequence_parallel_size", actor.ulysses_sequence_parallel_size)
    sizes = [
        (
            "rollout",
            f"{_ROLLOUT}.tensor_model_parallel_size",
            config.actor_rollout_ref.rollout.tensor_model_parallel_size,
        ),
        shared,
        ("actor", f"{_ACTOR}.fsdp_config.fsdp_size", actor.fsdp_config.fsdp_size),
        ("reference", f"{_REF}.fsdp_config.fsdp_size", config.actor_rollout_ref.ref.fsdp_config.fsdp_size),
    ]
    if "reference" in config.own_pools:  # elsewhere its ranks are the actor's
        sizes.append(("reference", *shared[1:]))
    for role, section in (("critic", config.critic), ("reward_model", config.reward_model)):
        key = f"{role}.ulysses_sequence_parallel_size"
        sizes.append((role, key, section.ulysses_sequence_parallel_size))
        sizes.append((role, f"{role}.fsdp_config.fsdp_size", section.fsdp_config.fsdp_size))
    for role, key, size in sizes:
        ranks = config.ranks(role)
        if size != -1 and ranks % size:
            yield f"{key}={size} does not divide {_ranks(config, role)}: set {key}={largest_divisor(ranks, size)}"


def too_few_gpus(config: Config, gpus: int) -> str:
    """Return the message for pools that one machine cannot hold together."""
    wanted = [f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}"]
    wanted += [
        f"{pool_section(role)}.n_gpus_per_node={pool.n_gpus_per_node}" for role, pool in config.own_pools.items()
    ]
    left = gpus - sum(pool.n_gpus_per_node for pool in config.own_pools.values())
    way_out = f"set trainer.n_gpus_per_node={left}" if left > 0 else "set resource_pool.enable=False for some of them"
    return f"{' + '.join(wanted)} = {config.ranks_per_node} GPUs, but this machine has {gpus}: {way_out}"


def warnings(config: Config) -> Messages:
    """Pools that have no effect, and pools with more ranks than rows."""
    sections = {
        "reference": config.actor_rollout_ref.ref.resource_pool,
        "critic": config.critic.resource_pool,
        "reward_model": config.reward_model.resource_pool,
    }
    for role, pool in sections.items():
        key = pool_section(role)
        if pool.enable and role not in config.own_pools:
            yield f"{key}.enable=True has no effect: this run has no {role.replace('_', ' ')}"
        if not pool.enable and (pool.n_gpus_per_node, pool.nnodes) != (1, 1):
            yield f"{key} has a size, but {key}.enable=False: the {role.replace('_', ' ')} shares the trainer's ranks"
    for role, pool in config.own_pools.items():
        shares = config.ranks(role) // config.sequence_parallel_size(role)
        if config.rows_per_step < shares:
            yield f"{config.rows_per_step} rows a step leave some of {_ranks(config, role)} idle"
        if pool.nnodes > 1 and config.trainer.nnodes == 1 and config.ray_kwargs.ray_init.address is None:
            key = f"{pool_section(role)}.nnodes={pool.nnodes}"
            yield f"{key}: start a Ray cluster first and set ray_kwargs.ray_init.address=auto"


def _ranks(config: Config, role: str) -> str:
    section = pool_section(role) if role in config.own_pools else "trainer"
    return f"{section}.n_gpus_per_node * {section}.nnodes = {config.ranks(role)} ranks"
