"""The training loop. `step()` reads as the algorithm: generate, score, log-probs, values, advantages, updates, sync."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from vrl.controller.baseline import Baseline
from vrl.controller.checkpoints import Checkpoints
from vrl.controller.corrections import Corrections, LossColumns, no_columns
from vrl.controller.credit import Advantage, Rewards
from vrl.controller.data_metrics import (
    balance_metrics,
    data_metrics,
    failure_metrics,
    memory_used_gb,
    own_processes,
    performance_metrics,
)
from vrl.controller.evaluation import Evaluation
from vrl.controller.group_filter import Groups, all_rows
from vrl.controller.patience import Patience
from vrl.controller.roles import Actor, Generated, LogProbs, Rollout, Scores, Values, stage_seconds
from vrl.controller.rollout_files import RolloutFiles
from vrl.controller.tracking import Tracker
from vrl.controller.worker_group import WorkerGroup
from vrl.data.loader import PromptLoader
from vrl.protocol.columns import MINI_BATCH, UID
from vrl.protocol.dataproto import DataProto
from vrl.protocol.dispatch import assign_mini_batches
from vrl.protocol.errors import RewardError
from vrl.protocol.metrics import reduce_metrics
from vrl.protocol.trajectory import Prompt, Sampling

_LOG = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Who does what. Roles that a run does not need are null objects."""

    rollout: Rollout
    rollout_group: WorkerGroup
    groups: Groups
    baseline: Baseline
    reward: Scores
    actor: Actor
    old_policy: LogProbs
    reference: LogProbs
    critic: Values


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatches:
    """How a role's rows become optimizer steps."""

    prompts: int
    epochs: int
    shuffle: bool
    add: LossColumns = no_columns

    def assign(self, batch: DataProto, seed: int) -> DataProto:
        """Return the rows with column `mini_batch`, `[B, epochs]`: the optimizer step of an epoch that a row is in.

        And with what the loss asks for: the tokens it chooses from each mini-batch, or the groups.
        """
        column = assign_mini_batches(list(batch.objects[UID]), self.prompts, self.epochs, seed, self.shuffle)
        return self.add(batch.with_columns(**{MINI_BATCH: column}), seed)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The run's length and its rhythm, in steps."""

    total_steps: int
    test_freq: int
    save_freq: int
    val_before_train: bool
    critic_warmup: int
    seed: int
    ranks: int  # of the actor that hold different rows
    total_ranks: int  # of all pools
    share_prompts: bool  # ranks compute a prompt once
    max_failed_ratio: float
    max_steps_without_samples: int
    max_nonfinite_steps: int
    stop_on_reward_failure: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What a run leaves behind."""

    tracker: Tracker
    rollout_files: RolloutFiles
    evaluation: Evaluation
    checkpoints: Checkpoints


@final
class Timers:
    """Seconds of named stages of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the block's time to `timing_s/<stage>`, also when it fails."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            name = f"timing_s/{stage}"
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


@final
class Trainer:
    """PPO or GRPO over worker groups, from a single driver."""

    def __init__(
        self,
        roles: Roles,
        loader: PromptLoader,
        sampling: Sampling,
        credit: tuple[Rewards, Advantage, Corrections],
        mini_batches: tuple[MiniBatches, MiniBatches],
        plan: Plan,
        outputs: Outputs,
    ) -> None:
        self.roles = roles
        self.loader = loader
        self.sampling = sampling
        self.rewards, self.advantage, self.corrections = credit
        self.actor_batches, self.critic_batches = mini_batches
        self.plan = plan
        self.outputs = outputs
        self.global_step = 0
        self.policy_version = 0  # rises by one with each completed weight sync
        self._patience = Patience(plan.max_steps_without_samples, plan.max_nonfinite_steps)

    def fit(self) -> None:
        """Train to the last step; evaluate and save as the plan says."""
        self.global_step = self.outputs.checkpoints.resume(self)
        self.roles.actor.sync_weights_to(self.roles.rollout_group, self.policy_version)
        _LOG.info("engines hold policy version %d at step %d", self.policy_version, self.global_step)
        if self.plan.val_before_train and self.global_step == 0:
            self.outputs.tracker.log(self.outputs.evaluation.run(self.roles.rollout, 0), 0)
        while self.global_step < self.plan.total_steps:
            self.global_step += 1
            metrics = self.step(self.loader.next_batch())
            self.outputs.tracker.log(metrics, self.global_step)  # at once: what follows may fail, or be killed
            self._patience.check(metrics)
            if self._due(self.plan.test_freq):
                evaluated = self.outputs.evaluation.run(self.roles.rollout, self.global_step)
                self.outputs.tracker.log(evaluated, self.global_step)
            if self._due(self.plan.save_freq):
                self.outputs.tracker.log(self.outputs.checkpoints.save(self), self.global_step)
        self.outputs.rollout_files.finish()

    def evaluate(self) -> None:
        """Evaluate the weights of the checkpoint that the settings ask for, once."""
        self.global_step = self.outputs.checkpoints.load_policy(self)
        self.roles.actor.sync_weights_to(self.roles.rollout_group, self.policy_version)
        self.outputs.tracker.log(self.outputs.evaluation.run(self.roles.rollout, self.global_step), self.global_step)

    def step(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Run one step of the algorithm; return its metrics."""
        roles, timer = self.roles, Timers()
        with timer("step"):
            with timer("gen"):
                generated = roles.rollout.generate(prompts, self.sampling, self.global_step)
                generated, prompts = roles.groups.complete(generated, prompts, self.global_step)
            with timer("gen_max"):
                generated = roles.baseline.beside(generated, prompts, self.global_step)
            with timer("reward_model"):
                generated = roles.reward.score(generated)
            batch = self._usable(generated)
            if not len(batch):
                return self._without_samples(generated, timer)
            roles.rollout.sleep()
            with timer("old_log_prob"):
                batch |= roles.old_policy.log_probs(batch)
            with timer("ref"):
                batch |= roles.reference.log_probs(batch)
            with timer("values"):
                batch |= roles.critic.values(batch)
            with timer("adv"):
                batch |= self.rewards(batch)
                batch |= self.advantage(batch)
                learnt, metrics = self.corrections(batch)
            self._patience.count(len(learnt))
            with timer("update_critic"):
                critic_metrics = roles.critic.update(self.critic_batches.assign(learnt, self._update_seed()))
            if self.global_step > self.plan.critic_warmup:
                with timer("update_actor"):
                    metrics |= roles.actor.update(self.actor_batches.assign(learnt, self._update_seed()))
            with timer("update_critic"):  # on a pool of its own it has learned beside the actor
                metrics = reduce_metrics([critic_metrics(), metrics])  # of the peaks of memory the higher one
            with timer("update_weights"):  # also when the critic alone has learned: it wakes the engines
                self.policy_version += 1
                roles.actor.sync_weights_to(roles.rollout_group, self.policy_version)
        return self._metrics(batch, generated, metrics, timer)

    # -- around a step ------------------------------------------------------------------------------------------

    def _usable(self, generated: Generated) -> DataProto:
        """Return the rows to train on; too many failures end the run with the first cause."""
        self.outputs.rollout_files.write_beside(all_rows(generated), self.global_step)
        check_failures(
            generated, self.global_step, 0.0 if self.plan.stop_on_reward_failure else self.plan.max_failed_ratio
        )
        return generated.rows

    def _without_samples(self, generated: Generated, timer: Timers) -> dict[str, float]:
        self._patience.count(0)
        return {**failure_metrics(generated.failed), **generated.metrics, **timer.seconds}

    def _metrics(
        self, batch: DataProto, generated: Generated, metrics: dict[str, float], timer: Timers
    ) -> dict[str, float]:
        return {
            "training/global_step": float(self.global_step),
            "training/epoch": float(self.loader.epoch),
            "training/policy_version": float(generated.policy_version),
            **failure_metrics(generated.failed),
            **data_metrics(batch),
            **self.rewards.metrics,
            **metrics,
            **generated.metrics,
            **generated.timing,
            **stage_seconds(batch),
            **timer.seconds,
            **performance_metrics(timer.seconds, batch, self.plan.total_ranks),
            **balance_metrics(batch, self.plan.ranks, share_prompts=self.plan.share_prompts),
            "perf/cpu_memory_used_gb": memory_used_gb(own_processes()),
        }

    def _due(self, freq: int) -> bool:
        """Whether something that happens every `freq` steps, and at the end, is due."""
        return self.global_step == self.plan.total_steps or (freq > 0 and self.global_step % freq == 0)

    def _update_seed(self) -> int:
        return self.plan.seed * 1_000_003 + self.global_step

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the roles' own state."""
        return {
            "global_step": self.global_step,
            "policy_version": self.policy_version,
            "loader": self.loader.state_dict(),
            "kl_beta": self.rewards.controller.beta,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.loader.load_state_dict(state["loader"])
        self.policy_version = int(state["policy_version"])
        self.rewards.restore(state["kl_beta"])

    def learners(self) -> tuple[Actor, Values]:
        """Return the roles whose weights a checkpoint keeps."""
        return self.roles.actor, self.roles.critic


def check_failures(generated: Generated, step: int, max_failed_ratio: float) -> None:
    """Raise RewardError when more than this share of a step's episodes failed outside the model."""
    failed = len(generated.failed)
    total = failed + len(generated.rows) + len(generated.dropped)
    if failed > max_failed_ratio * total:
        raise RewardError(
            f"step {step}: {failed} of {total} episodes failed outside the model; the first: "
            f"{generated.failed.objects['score_extra'][0].get('failure')}"
        )
