"""The settings of a run as one frozen value. `controller.compose` makes it once; a part gets the section it needs.

Keys are verl's where verl has them. Nothing is ever written back: sizes that follow from other settings are properties.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from vrl.protocol.config.algorithm import AlgorithmConfig, CustomRewardFunctionConfig, RewardModelConfig
from vrl.protocol.config.data import DataConfig
from vrl.protocol.config.learner import ActorConfig, CriticConfig, RefConfig
from vrl.protocol.config.model import ModelConfig, ResourcePoolConfig
from vrl.protocol.config.names import GROUP_LOSSES, SUM_PI_SQUARED_ESTIMATORS, VALUE_ESTIMATORS
from vrl.protocol.config.rollout import RolloutConfig
from vrl.protocol.config.trainer import PrepareConfig, RayKwargsConfig, TrainerConfig, WarmStartConfig


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ActorRolloutRefConfig:
    """The roles that share the policy's model."""

    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of a run."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    ray_kwargs: RayKwargsConfig = field(default_factory=RayKwargsConfig)

    @property
    def world_size(self) -> int:
        """Ranks of actor and rollout, and of every role without a pool of its own."""
        return self.trainer.n_gpus_per_node * self.trainer.nnodes

    @property
    def own_pools(self) -> Mapping[str, ResourcePoolConfig]:
        """Pools beside that of `trainer`, by the one role that lives in each; only roles that the run has.

        Actor and rollout stay together: weights are resharded within their processes, never sent between pools.
        """
        pools = {
            "reference": (
                self.needs_reference and not self.reference_is_base,
                self.actor_rollout_ref.ref.resource_pool,
            ),
            "critic": (self.needs_critic, self.critic.resource_pool),
            "reward_model": (self.reward_model.enable, self.reward_model.resource_pool),
        }
        return {role: pool for role, (needed, pool) in pools.items() if needed and pool.enable}

    def ranks(self, role: str) -> int:
        """Ranks of the pool that a role lives in."""
        pool = self.own_pools.get(role)
        return self.world_size if pool is None else pool.n_gpus_per_node * pool.nnodes

    @property
    def total_ranks(self) -> int:
        """Ranks of all pools together."""
        return self.world_size + sum(self.ranks(role) for role in self.own_pools)

    @property
    def ranks_per_node(self) -> int:
        """Ranks that one machine would hold when all pools lie on it."""
        return self.trainer.n_gpus_per_node + sum(pool.n_gpus_per_node for pool in self.own_pools.values())

    @property
    def data_parallel_size(self) -> int:
        """Ranks of the actor that hold different rows."""
        return self.world_size // self.sequence_parallel_size("actor")

    def sequence_parallel_size(self, role: str) -> int:
        """Return how many neighbouring ranks of a role hold the same rows and share their tokens."""
        sizes = {
            "actor": self.actor_rollout_ref.actor.ulysses_sequence_parallel_size,
            "reference": self.actor_rollout_ref.actor.ulysses_sequence_parallel_size,
            "critic": self.critic.ulysses_sequence_parallel_size,
            "reward_model": self.reward_model.ulysses_sequence_parallel_size,
        }
        return sizes.get(role, 1)

    def shares_prompts(self, role: str) -> bool:
        """Tell whether a role computes a prompt once for the rows of its group."""
        return self.actor_rollout_ref.actor.use_prefix_grouper and role in ("actor", "reference", "critic")

    @property
    def num_replicas(self) -> int:
        """Engines."""
        return self.world_size // self.actor_rollout_ref.rollout.tensor_model_parallel_size

    @property
    def rows_per_step(self) -> int:
        """Rows a step when no episode fails: prompts times samples."""
        return self.data.train_batch_size * self.actor_rollout_ref.rollout.n

    @property
    def prompts_per_draw(self) -> int:
        """Prompts that are drawn at a time: those of a step, or as many as asked for where groups are filtered."""
        own = self.data.gen_batch_size if self.algorithm.filter_groups.enable else None
        return own or self.data.train_batch_size

    @property
    def mini_batches_per_epoch(self) -> int:
        """Mini-batches of the actor in one pass over a step's rows; the last may be smaller."""
        return -(-self.data.train_batch_size // self.actor_rollout_ref.actor.ppo_mini_batch_size)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of the actor a training step. With one, old log-probs are the update's own."""
        return self.mini_batches_per_epoch * self.actor_rollout_ref.actor.ppo_epochs

    @property
    def max_model_len(self) -> int:
        """Tokens of context of the engine."""
        limit = self.actor_rollout_ref.rollout.max_model_len
        return self.data.max_prompt_length + self.data.max_response_length if limit is None else limit

    @property
    def needs_critic(self) -> bool:
        """Whether there is a value model."""
        if self.critic.enable is not None:
            return self.critic.enable
        return self.algorithm.adv_estimator in VALUE_ESTIMATORS

    @property
    def needs_reference(self) -> bool:
        """Whether there is a reference policy."""
        actor = self.actor_rollout_ref.actor
        return actor.use_kl_loss or self.algorithm.use_kl_in_reward or actor.policy_loss.loss_mode in GROUP_LOSSES

    @property
    def needs_sum_pi_squared(self) -> bool:
        """Whether the actor returns the sum of squared probabilities beside old log-probs."""
        return self.algorithm.adv_estimator in SUM_PI_SQUARED_ESTIMATORS

    @property
    def scores_by_rule(self) -> bool:
        """Whether reward functions run: always, unless a reward model alone counts."""
        return not self.reward_model.enable or self.reward_model.rule_weight != 0.0

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference is the actor's own model without its adapter, so that no other one is loaded."""
        return self.needs_reference and self.actor_rollout_ref.model.uses_lora

    @property
    def overlong_length(self) -> int:
        """Tokens after the prompt at which the overlong penalty is full."""
        return self.reward_model.max_resp_len or self.data.max_response_length

    @property
    def tokenizer_path(self) -> str:
        """Folder of tokenizer and processor."""
        return self.actor_rollout_ref.model.tokenizer_path or self.actor_rollout_ref.model.path

    @property
    def critic_model_path(self) -> str:
        """Folder of the critic's backbone."""
        return self.critic.model.path or self.actor_rollout_ref.model.path

    @property
    def critic_mini_batch_size(self) -> int:
        """Prompts an optimizer step of the critic."""
        return self.critic.ppo_mini_batch_size or self.actor_rollout_ref.actor.ppo_mini_batch_size

    @property
    def critic_epochs(self) -> int:
        """Passes of the critic over a step's rows."""
        return self.critic.ppo_epochs or self.actor_rollout_ref.actor.ppo_epochs

    @property
    def exported_roles(self) -> tuple[str, ...]:
        """Roles whose checkpoints also have a model folder that others can load."""
        wanted = {"actor": self.actor_rollout_ref.actor.checkpoint, "critic": self.critic.checkpoint}
        return tuple(role for role, checkpoint in wanted.items() if "hf_model" in checkpoint.save_contents)

    @property
    def critic_token_budget(self) -> int:
        """Tokens a micro-batch and rank of the critic."""
        return self.critic.ppo_max_token_len_per_gpu or self.actor_rollout_ref.actor.ppo_max_token_len_per_gpu

    @property
    def log_prob_token_budget(self) -> int:
        """Tokens a micro-batch and rank when the actor computes old log-probs."""
        actor, rollout = self.actor_rollout_ref.actor, self.actor_rollout_ref.rollout
        return rollout.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu

    @property
    def ref_token_budget(self) -> int:
        """Tokens a micro-batch and rank of the reference."""
        actor, ref = self.actor_rollout_ref.actor, self.actor_rollout_ref.ref
        return ref.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu

    @property
    def log_prob_rows(self) -> int | None:
        """Rows a micro-batch when the actor computes old log-probs by rows."""
        rollout = self.actor_rollout_ref.rollout
        return rollout.log_prob_micro_batch_size_per_gpu or self.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu

    @property
    def ref_rows(self) -> int | None:
        """Rows a micro-batch of the reference, where rows are counted."""
        ref = self.actor_rollout_ref.ref
        return ref.log_prob_micro_batch_size_per_gpu or self.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu

    @property
    def critic_rows(self) -> int | None:
        """Rows a micro-batch of the critic, where rows are counted."""
        return self.critic.ppo_micro_batch_size_per_gpu or self.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu

    @property
    def reward_model_token_budget(self) -> int:
        """Tokens a micro-batch and rank of the reward model."""
        actor = self.actor_rollout_ref.actor
        return self.reward_model.forward_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu

    @property
    def data_seed(self) -> int:
        """Seed of the order of training rows."""
        return self.trainer.seed if self.data.seed is None else self.data.seed

    @property
    def rollout_seed(self) -> int:
        """Seed from which every request's seed is made."""
        seed = self.actor_rollout_ref.rollout.seed
        return self.trainer.seed if seed is None else seed
