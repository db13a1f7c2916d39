"""The rollout worker: engine, renderer and reward processes; generates the rows of a step and takes new weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar, final

import torch
import torch.distributed as dist

from vrl.agent.environments.configured import environment_spec, observation_roles
from vrl.agent.environments.pool import EnvironmentPool, Schemas
from vrl.agent.episode import EpisodeLimits
from vrl.agent.loop import EpisodeLoop, Scorer, Unscored
from vrl.agent.rewards.pool import RewardPool
from vrl.agent.rewards.types import RewardSpec
from vrl.agent.sources import LockStepSource, TrajectoryList
from vrl.agent.tool_side import ToolSide
from vrl.protocol.config.schema import Config
from vrl.protocol.dataproto import DataProto, Meta
from vrl.protocol.dispatch import Dispatch, register
from vrl.protocol.ports import Engine, PromptSource, Renderer
from vrl.protocol.rows import batch_of
from vrl.protocol.trajectory import Sampling, StopReason, Trajectory
from vrl.workers.actor import ActorWorker
from vrl.workers.building import BuildContext
from vrl.workers.engines import build_engine

_T = TypeVar("_T")


@final
@dataclass(frozen=True, slots=True)
class EngineGroup:
    """The ranks that share one engine: its number, and the group that keeps them in step (None for one rank)."""

    replica: int
    is_leader: bool
    leader_rank: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, tensor_parallel: int) -> Self:
        """Cut the world into engines of neighbouring ranks. All ranks must call it."""
        rank, world = dist.get_rank(), dist.get_world_size()
        replica, place = divmod(rank, tensor_parallel)
        mine: dist.ProcessGroup | None = None
        if tensor_parallel > 1:
            for start in range(0, world, tensor_parallel):
                group = dist.new_group(list(range(start, start + tensor_parallel)), backend="gloo")
                if isinstance(group, dist.ProcessGroup):  # a rank outside gets a number instead
                    mine = group
        return cls(replica, place == 0, rank - place, mine)

    def share(self, values: list[_T] | None) -> list[_T]:
        """Return the leader's list on every rank of the engine; the others give None. A collective."""
        box = [values]
        dist.broadcast_object_list(box, src=self.leader_rank, group=self.group)
        assert box[0] is not None
        return box[0]


@final
@dataclass(frozen=True, slots=True)
class SideProcesses:
    """The processes beside a replica: reward processes, and tool processes where environments are configured.

    Ranks that only follow their engine's leader have neither, and the leader's schemas.
    """

    scorer: Scorer
    environments: EnvironmentPool | None = None
    schemas: Schemas | None = None

    @classmethod
    def start(cls, config: Config, place: EngineGroup, scorer: Scorer) -> Self:
        """Start the tool processes that the settings ask for. A collective of the ranks that share an engine."""
        spec = environment_spec(config)
        if not spec.kinds:
            return cls(scorer)
        pool = None
        if place.is_leader:
            pool = EnvironmentPool(config.actor_rollout_ref.rollout.agent.concurrent_workers, spec)
        schemas = [pool.schemas] if pool is not None else None
        if place.group is not None:
            schemas = place.share(schemas)
        assert schemas is not None
        return cls(scorer, pool, schemas[0])

    def close(self) -> None:
        """End the processes."""
        if isinstance(self.scorer, RewardPool):
            self.scorer.close()
        if self.environments is not None:
            self.environments.close()


@final
class RolloutWorker:
    """One replica, or one rank of a tensor-parallel one."""

    def __init__(self, engine: Engine, beside: SideProcesses, context: BuildContext, place: EngineGroup) -> None:
        self._engine = engine
        self._renderer: Renderer = context.renderer
        self._images = context.images
        self._beside = beside
        self._config = context.config
        self._place = place
        self.policy_version = -1  # no weights yet: a rollout before the first sync is a mistake of ours

    @classmethod
    def build(cls, context: BuildContext) -> Self:
        """Start the engine and, on leaders, tool processes, and reward processes where reward functions count."""
        config = context.config
        if config.actor_rollout_ref.rollout.agent.environments:
            context.renderer.check_turns(observation_roles(config))
        place = EngineGroup.of(config.actor_rollout_ref.rollout.tensor_model_parallel_size)
        engine = build_engine(context, place.replica)
        scorer: Scorer = _reward_pool(config) if place.is_leader and config.scores_by_rule else Unscored()
        return cls(engine, SideProcesses.start(config, place, scorer), context, place)

    @register(Dispatch.ALL)
    def generate(self, sources: Sequence[PromptSource], sampling: Sampling, step: int) -> DataProto | None:
        """Run episodes until this replica's source is empty; leaders return their rows.

        `sources` has one entry a replica; several may be the same shared queue.
        """
        if self._images is not None:
            self._images.clear()  # new rows, new images: what the learners of this process hold is from the last step
        source = sources[self._place.replica]
        if self._place.group is not None:
            source = LockStepSource(source if self._place.is_leader else None, self._place.share)
        sink = TrajectoryList()
        loop = EpisodeLoop(
            self._engine, self._renderer, self._beside.scorer, episode_limits(self._config), sampling, self._tool_side()
        )
        seconds = loop.run(source, sink, step, self.policy_version)
        if not self._place.is_leader:
            return None
        timing = {
            "gen/engine": seconds.engine,
            "gen/loop": seconds.total - seconds.engine - seconds.tools - seconds.waiting_for_rewards,
            "reward": seconds.waiting_for_rewards,
        }
        if self._beside.environments is not None:
            timing["gen/tools"] = seconds.tools
        meta = Meta(global_step=step, policy_version=self.policy_version, timing=timing)
        return rows_of(sink.trajectories, self._renderer, meta, needs_positions=self._images is not None)

    @register(Dispatch.ALL)
    def sync_weights(self, actor: ActorWorker, version: int) -> None:
        """Take the actor's present weights into the engine; from now on they are policy `version`."""
        self._engine.wake(["weights"])
        self._engine.load_weights(actor.full_weights())
        self._engine.wake(["kv_cache"])
        self._engine.reset_caches()
        self.policy_version = version

    @register(Dispatch.ALL)
    def sleep(self) -> None:
        """Give the engine's memory back while the learners work; `sync_weights` wakes it."""
        self._engine.sleep()

    def close(self) -> None:
        """End reward processes, tool processes and the engine."""
        self._beside.close()
        self._engine.close()

    def _tool_side(self) -> ToolSide:
        return ToolSide(
            self._beside.environments,
            self._beside.schemas,
            share=None if self._place.group is None else self._place.share,
            in_order=self._config.trainer.deterministic,
            leads=self._place.is_leader,
        )


def rows_of(trajectories: Sequence[Trajectory], renderer: Renderer, meta: Meta, *, needs_positions: bool) -> DataProto:
    """Return one row a trajectory, with positions where the model needs them.

    The model decides, not the rows: replicas whose episodes all failed give the columns of the others.
    """
    if not needs_positions:
        return batch_of(trajectories, None, meta)
    nowhere = torch.zeros(1, 3, dtype=torch.int64)
    positions = [
        nowhere if _is_empty(t) else torch.as_tensor(renderer.positions(t.input_ids, t.images)) for t in trajectories
    ]
    return batch_of(trajectories, positions, meta)


def _is_empty(trajectory: Trajectory) -> bool:
    """Whether an episode failed before it had a token of its own."""
    return trajectory.stop_reason is StopReason.FAILED and len(trajectory.input_ids) == 1


def episode_limits(config: Config) -> EpisodeLimits:
    """Return what the settings allow an episode."""
    rollout = config.actor_rollout_ref.rollout
    return EpisodeLimits(
        max_response_tokens=config.data.max_response_length,
        max_model_len=config.max_model_len,
        max_running=rollout.max_num_seqs,
        max_turns=rollout.agent.max_turns,
        max_seconds=rollout.agent.max_seconds(acts=True),
        max_plain_seconds=rollout.agent.max_seconds(acts=False),
        max_retries=rollout.agent.max_retries,
        max_images=rollout.agent.max_images,
        max_row_images=rollout.limit_images or 1,
        max_image_pixels=rollout.agent.max_image_pixels,
    )


def _reward_pool(config: Config) -> RewardPool:
    return RewardPool(config.reward_model.num_workers, config.reward_model.timeout, reward_spec(config))


def reward_spec(config: Config) -> RewardSpec:
    """Return what the reward processes load."""
    custom = config.custom_reward_function
    return RewardSpec(
        function_path=custom.path,
        function_name=custom.name,
        function_kwargs=custom.reward_kwargs or config.reward_model.reward_kwargs,
        sandbox=config.actor_rollout_ref.rollout.multi_turn.sandbox,
    )
