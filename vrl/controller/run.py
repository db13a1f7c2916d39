"""Puts a run together from its settings: Ray, pool, roles, data, trainer. Called by the command line."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import ray

from vrl.agent.rewards.pool import check_rewards
from vrl.algorithms.advantages.registry import AdvantageParams, get_advantage
from vrl.algorithms.losses.registry import get_policy_loss
from vrl.controller.baseline import GreedyBaseline, NoBaseline
from vrl.controller.checkpoints import Checkpoints
from vrl.controller.corrections import correction_params, corrections, loss_columns
from vrl.controller.credit import Advantage, Rewards, reward_shaping
from vrl.controller.environments import Tools, checked_environments
from vrl.controller.evaluation import Evaluation
from vrl.controller.group_filter import group_filter
from vrl.controller.pools import Pools, pool_specs
from vrl.controller.prompt_queue import start_queue
from vrl.controller.resource_pool import check_cluster
from vrl.controller.reward_model import RewardModel, check_text_only
from vrl.controller.roles import (
    Actor,
    BaseAsReference,
    Critic,
    LogProbs,
    NoCritic,
    NoLogProbs,
    NoRewardModel,
    Reference,
    Rollout,
    Scores,
)
from vrl.controller.rollout_files import RolloutFiles
from vrl.controller.run_folder import RunFolder
from vrl.controller.tracking import Tracker
from vrl.controller.trainer import MiniBatches, Outputs, Plan, Roles, Trainer
from vrl.controller.warm_start import warm_started
from vrl.controller.worker_group import WorkerGroup, start_ray
from vrl.data.dataset import RowDataset, load_rows
from vrl.data.filtering import FilterReport, filter_rows, overlong_policy
from vrl.data.loader import PromptLoader, ordered_batches
from vrl.data.prompts import ColumnNames
from vrl.models.renderer import HFRenderer, load_renderer
from vrl.protocol.config.schema import Config
from vrl.protocol.errors import ConfigError
from vrl.protocol.trajectory import Prompt, Sampling
from vrl.workers.host import RunLength
from vrl.workers.rollout import reward_spec

_LOG = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class RunData:
    """The rows of a run, filtered."""

    loader: PromptLoader
    validation: list[Prompt]
    most_images: int  # images of the row that has most
    data_sources: frozenset[str]


def load_data(config: Config, renderer: HFRenderer, tools: Tools | None = None) -> RunData:
    """Read and check all rows; `tools` says which environments there are.

    Raises DataError before anything expensive has started.
    """
    data, tools = config.data, tools or Tools()
    validation: list[Prompt] = []
    most_images, sources = 0, frozenset[str]()
    if data.val_files:
        rows, report = _rows(config, renderer, tools, data.val_files, "held-out")
        validation = next(ordered_batches(rows))
        most_images, sources = report.most_images, report.data_sources
        if config.trainer.val_only:  # no step draws prompts: training rows, which may be many, are not looked at
            return RunData(PromptLoader(rows, 1), validation, most_images, sources)
    train, report = _rows(config, renderer, tools, data.train_files, "training")
    loader = PromptLoader(train, config.prompts_per_draw, seed=config.data_seed, shuffle=data.shuffle)
    return RunData(loader, validation, max(most_images, report.most_images), sources | report.data_sources)


def _rows(
    config: Config, renderer: HFRenderer, tools: Tools, files: tuple[str, ...], what: str
) -> tuple[RowDataset, FilterReport]:
    data = config.data
    limit = data.train_max_samples if what == "training" else data.val_max_samples
    columns = ColumnNames(prompt=data.prompt_key, image=data.image_key, data_source=data.reward_fn_key)
    rows = load_rows(
        files,
        columns=columns,
        max_samples=limit,
        seed=config.data_seed,
        env_names=[*tools.schemas, *tools.left_out],
        left_out=tools.left_out,
        sources_left_out=tools.sources_left_out,
    )
    rows, report = filter_rows(
        rows,
        renderer,
        data.max_prompt_length,
        overlong=overlong_policy(data.filter_overlong_prompts, data.truncation),
        bad_row=data.bad_row,
        workers=data.filter_overlong_prompts_workers,
        tools=tools.schemas,
    )
    _LOG.info("%s rows: %s", what, report.summary())
    return rows, report


def with_image_limit(config: Config, most_images: int) -> Config:
    """Return the settings with the engine's image limit, where it is left open: from the data, and what tools add.

    Raises ConfigError when a limit that is set leaves no room for a row's own images.
    """
    policy = config.actor_rollout_ref
    added = policy.rollout.agent.max_images if policy.rollout.agent.environments else 0
    limit, key = policy.rollout.limit_images, "actor_rollout_ref.rollout.limit_images"
    if limit is not None:
        if limit < most_images:
            raise ConfigError(
                f"{key}={limit}: a row of the data has {most_images} images; leave it out, or raise it to "
                f"{most_images + added}"
            )
        if limit < most_images + added:
            _LOG.warning(
                "%s=%d: a row has %d images, and agent.max_images=%d more are allowed: its episodes end at the limit "
                "of the engine; leave it out, or lower agent.max_images",
                *(key, limit, most_images, added),
            )
        return config
    rollout = replace(policy.rollout, limit_images=max(most_images + added, 1))
    return replace(config, actor_rollout_ref=replace(policy, rollout=rollout))


def total_steps(config: Config, loader: PromptLoader) -> int:
    """Return the steps of the run: as asked for, else by epochs. Warns where they are too few for the policy to learn.

    Before the rows are read this is not known, unless the settings say it, and then they are refused.
    """
    steps = config.trainer.total_training_steps or len(loader) * config.trainer.total_epochs
    warmup = config.trainer.critic_warmup
    if warmup >= steps and not config.trainer.val_only:
        _LOG.warning(
            "trainer.critic_warmup=%d is all of the %d steps of trainer.total_epochs=%d: the policy never learns; "
            "lower it, or raise total_epochs",
            warmup, steps, config.trainer.total_epochs,
        )  # fmt: skip
    return steps


@final
@dataclass(frozen=True, slots=True)
class Started:
    """What trainers are put together over: settings completed from model and data, the rows, the worker processes."""

    config: Config
    data: RunData
    processes: Pools


@contextmanager
def started(config: Config, gpus: bool) -> Iterator[Started]:
    """Yield processes without a role yet; end all of them afterwards, also after a failure.

    Environments, rows and rewards are looked at before Ray starts.
    """
    model = config.actor_rollout_ref.model
    renderer = load_renderer(config.tokenizer_path, model.min_pixels, model.max_pixels)
    config, tools = checked_environments(config, renderer)
    data = load_data(config, renderer, tools)
    config = with_image_limit(config, data.most_images)
    if config.scores_by_rule:
        check_rewards(replace(reward_spec(config), data_sources=tuple(sorted(data.data_sources))))
    if config.reward_model.enable:
        check_text_only(config, data.most_images)
    start_ray(config, gpus)
    try:
        specs = pool_specs(config, gpus)
        check_cluster(specs)
        config = warm_started(config, specs[0], tools.left_out)
        processes = Pools(specs, config)
        try:
            yield Started(config, data, processes)
            processes.close()
        finally:
            processes.kill()
    finally:
        ray.shutdown()


@contextmanager
def assembled(config: Config, folder: RunFolder, gpus: bool) -> Iterator[Trainer]:
    """Yield a trainer whose workers are up; end all processes afterwards, also after a failure."""
    with started(config, gpus) as run:
        config, loader = run.config, run.data.loader
        steps = total_steps(config, loader)
        groups = run.processes.build(role_names(config), run_length(config, steps), config)
        checkpoints = Checkpoints(folder, config.trainer, config.exported_roles)
        with Tracker(folder, config, total_steps=steps, resume_step=checkpoints.start_step()) as tracker:
            outputs = Outputs(
                tracker=tracker,
                rollout_files=RolloutFiles(Path(config.trainer.rollout_data_dir or folder.rollouts)),
                evaluation=replace(
                    _evaluation(config, run.data.validation, folder.validation, tracker),
                    reward=reward_role(config, groups),
                ),
                checkpoints=checkpoints,
            )
            yield trainer_over(config, groups, loader, steps, outputs)


def role_names(config: Config) -> list[str]:
    """Return the roles in the order they are built: the engine comes last, when the others have their memory."""
    names = ["actor"]
    if config.needs_reference and not config.reference_is_base:
        names.append("reference")
    if config.needs_critic:
        names.append("critic")
    if config.reward_model.enable:
        names.append("reward_model")
    return [*names, "rollout"]


def run_length(config: Config, steps: int) -> RunLength:
    """Return the optimizer steps of a run of so many steps; in the first ones the critic may learn alone."""
    critic = -(-config.data.train_batch_size // config.critic_mini_batch_size) * config.critic_epochs
    actor = max(steps - config.trainer.critic_warmup, 1) * config.updates_per_step
    return RunLength(actor=actor, critic=steps * critic)


def trainer_over(
    config: Config, groups: dict[str, WorkerGroup], loader: PromptLoader, steps: int, outputs: Outputs
) -> Trainer:
    """Return a trainer whose roles are those groups that the settings need."""
    queue = None if config.trainer.deterministic else start_queue(config.num_replicas)
    actor = Actor(groups["actor"])
    sampling = training_sampling(config)
    rollout = Rollout(groups["rollout"], config.num_replicas, queue, config.actor_rollout_ref.rollout.free_cache_engine)
    advantage = advantage_of(config)
    roles = Roles(
        rollout=rollout,
        rollout_group=groups["rollout"],
        groups=group_filter(config, rollout.generate, sampling, loader.next_batch),
        baseline=(
            GreedyBaseline(rollout, sampling, reward_shaping(config))
            if advantage.estimator.needs_reward_baselines
            else NoBaseline()
        ),
        reward=reward_role(config, groups),
        actor=actor,
        old_policy=actor if needs_old_log_probs(config) else NoLogProbs(),
        reference=_reference(config, groups),
        critic=Critic(groups["critic"], beside="critic" in config.own_pools) if config.needs_critic else NoCritic(),
    )
    policy = config.actor_rollout_ref.actor
    return Trainer(
        roles,
        loader,
        sampling,
        (
            Rewards(config.algorithm, reward_shaping(config)),
            advantage,
            corrections(config.algorithm, get_policy_loss(policy.policy_loss.loss_mode)),
        ),
        (
            MiniBatches(
                prompts=policy.ppo_mini_batch_size,
                epochs=policy.ppo_epochs,
                shuffle=policy.shuffle,
                add=loss_columns(policy),
            ),
            MiniBatches(prompts=config.critic_mini_batch_size, epochs=config.critic_epochs, shuffle=policy.shuffle),
        ),
        plan(config, steps),
        outputs,
    )


def reward_role(config: Config, groups: Mapping[str, WorkerGroup]) -> Scores:
    """Return who adds to the scores of the reward functions."""
    reward = config.reward_model
    return RewardModel(groups["reward_model"], reward.weight, reward.rule_weight) if reward.enable else NoRewardModel()


def _reference(config: Config, groups: Mapping[str, WorkerGroup]) -> LogProbs:
    if config.reference_is_base:
        return BaseAsReference(groups["actor"])
    return Reference(groups["reference"]) if config.needs_reference else NoLogProbs()


def needs_old_log_probs(config: Config) -> bool:
    """Whether old log-probs take a pass of their own.

    With one update a step its own forward pass gives them, unless something on the driver wants them before.
    """
    algorithm = config.algorithm
    return (
        config.updates_per_step > 1
        or algorithm.use_kl_in_reward
        or algorithm.rollout_correction.enabled
        or config.needs_sum_pi_squared
        or get_policy_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode).needs_selection
    )


def advantage_of(config: Config) -> Advantage:
    """Return the estimator with its settings, and with those of the importance weights where it reads them."""
    algorithm = config.algorithm
    is_gigpo = algorithm.adv_estimator == "gigpo"  # whose switch has a name of its own
    by_std = algorithm.gigpo.mode == "mean_std_norm" if is_gigpo else algorithm.norm_adv_by_std_in_grpo
    params = AdvantageParams(
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std=by_std,
        step_advantage_w=algorithm.gigpo.step_advantage_w,
        high_level_gamma=algorithm.high_level_gamma,
        component_weights=algorithm.gdpo_reward_weights,
        over_all_turns=algorithm.grpo_turn_over_all_turns,
    )
    estimator = get_advantage(algorithm.adv_estimator)
    keys = algorithm.gdpo_reward_keys if estimator.needs_reward_components else ()
    correction = algorithm.rollout_correction
    weighed = estimator.needs_sum_pi_squared and correction.rollout_is is not None
    return Advantage(estimator, params, keys, correction_params(correction) if weighed else None)


def plan(config: Config, steps: int) -> Plan:
    """Return length and rhythm of a run of so many steps."""
    trainer = config.trainer
    return Plan(
        total_steps=steps,
        test_freq=trainer.test_freq,
        save_freq=trainer.save_freq,
        val_before_train=trainer.val_before_train,
        critic_warmup=trainer.critic_warmup,
        seed=trainer.seed,
        ranks=config.data_parallel_size,
        total_ranks=config.total_ranks,
        share_prompts=config.shares_prompts("actor"),
        max_failed_ratio=config.actor_rollout_ref.rollout.agent.max_failed_ratio,
        max_steps_without_samples=trainer.max_steps_without_samples,
        max_nonfinite_steps=trainer.max_nonfinite_steps,
        stop_on_reward_failure=config.reward_model.on_failure == "stop",
    )


def training_sampling(config: Config) -> Sampling:
    """Return how training samples."""
    rollout = config.actor_rollout_ref.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=rollout.agent.single_response_max_tokens or config.data.max_response_length,
        stop=rollout.agent.custom_stop,
        ignore_eos=rollout.ignore_eos,
        n=rollout.n,
        seed=config.rollout_seed,
    )


def _evaluation(config: Config, prompts: list[Prompt], folder: Path, tracker: Tracker) -> Evaluation:
    wanted = config.actor_rollout_ref.rollout.val_kwargs
    sampling = Sampling(
        temperature=wanted.effective_temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        max_tokens=training_sampling(config).max_tokens,
        stop=config.actor_rollout_ref.rollout.agent.custom_stop,
        n=wanted.n,
        seed=config.rollout_seed + 1,
    )
    return Evaluation(
        prompts=prompts,
        sampling=sampling,
        greedy_beside=True,
        files=RolloutFiles(Path(config.trainer.validation_data_dir or folder)),
        show=tracker.log_samples,
    )
