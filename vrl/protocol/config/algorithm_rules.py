"""Rules across the keys of advantage, loss and reward; `rules` runs them with the others."""

from collections.abc import Iterator

from vrl.protocol.config.names import FIXED_AGGREGATION, GROUP_LOSSES, VALUE_ESTIMATORS, ZERO_VARIANCE_ESTIMATORS
from vrl.protocol.config.schema import Config

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_N = f"{_ROLLOUT}.n"

Messages = Iterator[str]


def losses(config: Config) -> Messages:
    """Bounds of the policy losses, and what the estimator needs of the critic."""
    actor = config.actor_rollout_ref.actor
    if not actor.clip_ratio_c > 1:
        yield f"{_ACTOR}.clip_ratio_c={actor.clip_ratio_c}: dual clip needs more than 1, for example 3.0"
    if not actor.clip_low < 1:
        key = "clip_ratio" if actor.clip_ratio_low is None else "clip_ratio_low"
        yield f"{_ACTOR}.{key}={actor.clip_low}: less than 1 is wanted, for example 0.2"
    loss = actor.policy_loss
    if not loss.clip_cov_lb < loss.clip_cov_ub:
        yield (
            f"{_ACTOR}.policy_loss.clip_cov_lb={loss.clip_cov_lb} must be below clip_cov_ub={loss.clip_cov_ub}: "
            "1.0 and 5.0 are usual"
        )
    estimator = config.algorithm.adv_estimator
    if estimator in VALUE_ESTIMATORS and not config.needs_critic:
        yield f"algorithm.adv_estimator={estimator} needs a critic, but critic.enable=False: set critic.enable=null"
    if estimator == "grpo_passk" and config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"algorithm.adv_estimator=grpo_passk compares the best sample of a prompt with the second best, but "
            f"{_N}=1: set n=8, for example"
        )


def critic_warmup(config: Config) -> Messages:
    """Steps in which the critic learns alone."""
    trainer, steps = config.trainer, config.trainer.total_training_steps
    if trainer.critic_warmup and not config.needs_critic:
        yield (
            f"trainer.critic_warmup={trainer.critic_warmup} needs a critic, which "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} does not use: set critic_warmup=0"
        )
    elif steps is not None and trainer.critic_warmup >= steps and not trainer.val_only:
        yield (
            f"trainer.critic_warmup={trainer.critic_warmup} is all of trainer.total_training_steps={steps}, so that "
            f"the policy never learns: set critic_warmup={steps // 10}, for example"
        )


def group_losses(config: Config) -> Messages:
    """Losses that compare the whole rows of a group."""
    loss = config.actor_rollout_ref.actor.policy_loss
    if loss.dpo_label_smoothing and loss.dpo_loss_type == "ipo":
        yield (
            f"{_ACTOR}.policy_loss.dpo_label_smoothing={loss.dpo_label_smoothing} has no effect with "
            "dpo_loss_type=ipo: set it to 0 or dpo_loss_type to sigmoid"
        )
    elif not loss.dpo_label_smoothing < 0.5:
        yield (
            f"{_ACTOR}.policy_loss.dpo_label_smoothing={loss.dpo_label_smoothing} is the share of flipped "
            "preferences: less than 0.5 is wanted, for example 0.1"
        )
    if loss.loss_mode not in GROUP_LOSSES:
        return
    mode, n, algorithm = (
        f"{_ACTOR}.policy_loss.loss_mode={loss.loss_mode}",
        config.actor_rollout_ref.rollout.n,
        config.algorithm,
    )
    if loss.loss_mode == "dpo" and n != 2:
        yield f"{mode} compares the two samples of a prompt, but {_N}={n}: set it to 2"
    elif n < 2:
        yield f"{mode} compares the samples of a prompt, but {_N}={n}: set it to 8, for example"
    if algorithm.rollout_correction.enabled or algorithm.mask_truncated_completions:
        yield (
            f"{mode} adds up log-probs over whole rows and has no place for weights or rejected tokens: set "
            "algorithm.rollout_correction.rollout_is=null, rollout_rs=null and "
            "algorithm.mask_truncated_completions=False"
        )


def filter_groups(config: Config) -> Messages:
    """Groups that are left out."""
    settings = config.algorithm.filter_groups
    if not settings.enable:
        return
    key = "algorithm.filter_groups"
    yield from _needs_groups(config, f"{key}.enable")
    if settings.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        yield (
            f"{key}.metric=seq_final_reward with algorithm.use_kl_in_reward=True needs log-probs while prompts are "
            "drawn: set metric=seq_reward"
        )
    most = config.prompts_per_draw * settings.draws
    if most < config.data.train_batch_size:
        yield (
            f"{settings.draws} draws ({key}.max_num_gen_batches) of data.gen_batch_size={config.prompts_per_draw} "
            f"prompts can never fill data.train_batch_size={config.data.train_batch_size}: set gen_batch_size=null"
        )


def zero_variance(config: Config) -> Messages:
    """Groups that are left out without others in their place."""
    algorithm, key = config.algorithm, "algorithm.zero_variance_filter"
    if not algorithm.zero_variance_filter:
        return
    yield from _needs_groups(config, key)
    if algorithm.filter_groups.enable:
        yield f"{key}=True leaves out what algorithm.filter_groups.enable=True replaces: set one of them to False"
    if algorithm.adv_estimator not in ZERO_VARIANCE_ESTIMATORS:
        yield (
            f"{key}=True leaves out groups that have advantage 0, which groups of equal rewards need not have with "
            f"algorithm.adv_estimator={algorithm.adv_estimator}: set it to one of "
            f"{', '.join(ZERO_VARIANCE_ESTIMATORS)}, or the filter to False"
        )
    if algorithm.use_kl_in_reward:
        yield (
            f"{key}=True with algorithm.use_kl_in_reward=True needs log-probs before rows are left out: set one of "
            f"them to False, {_ACTOR}.use_kl_loss=True is possible"
        )
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if loss in GROUP_LOSSES:
        yield (
            f"{key}=True leaves out advantages of 0, but {_ACTOR}.policy_loss.loss_mode={loss} reads none: set "
            "zero_variance_filter=False"
        )


def _needs_groups(config: Config, key: str) -> Messages:
    if config.actor_rollout_ref.rollout.n == 1:
        yield f"{key}=True leaves out groups that do not differ, but {_N}=1: set n=8, or {key}=False"
    if config.reward_model.enable:
        yield (
            f"{key}=True needs scores while prompts are drawn, and reward_model.enable=True gives them later: "
            "set one of them to False"
        )


def rewards(config: Config) -> Messages:
    """Reward shaping."""
    buffer, longest = config.reward_model.overlong_buffer, config.overlong_length
    if buffer.enable and not 1 <= buffer.len <= longest:
        limit = "data.max_response_length" if config.reward_model.max_resp_len is None else "reward_model.max_resp_len"
        yield (
            f"reward_model.overlong_buffer.len={buffer.len} must lie between 1 and {limit}={longest}: "
            f"set it to {max(1, longest // 4)}, for example, or overlong_buffer.enable=False"
        )
    if "overlong_buffer_cfg" in config.reward_model.reward_kwargs:
        yield "reward_model.reward_kwargs.overlong_buffer_cfg: write reward_model.overlong_buffer"


def gdpo(config: Config) -> Messages:
    """The parts of the score."""
    algorithm = config.algorithm
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if weights is not None and len(weights) != len(keys):
        yield (
            f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {len(keys)} algorithm.gdpo_reward_keys: "
            "give one for each key, or null for all 1"
        )
    if algorithm.adv_estimator != "gdpo":
        return
    if not keys:
        yield (
            "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys: name the parts of the score that the "
            "reward function returns beside it, algorithm.gdpo_reward_keys=[accuracy,format]"
        )
    reward, parts = config.reward_model, "algorithm.adv_estimator=gdpo compares the parts of the score, so"
    if algorithm.use_kl_in_reward:
        yield (
            f"{parts} algorithm.use_kl_in_reward=True has no effect: set it to False, {_ACTOR}.use_kl_loss=True is "
            "possible"
        )
    if reward.overlong_buffer.enable:
        yield f"{parts} reward_model.overlong_buffer.enable=True has no effect: set it to False"
    if reward.reward_clip is not None:
        yield f"{parts} reward_model.reward_clip={reward.reward_clip} has no effect: set it to null"
    if not reward.enable:
        return
    if "rm_score" not in keys:
        yield (
            f"{parts} reward_model.enable=True has no effect unless its score is one of them: add rm_score to "
            "algorithm.gdpo_reward_keys, or set enable=False"
        )
    if reward.weight != 1 or reward.rule_weight not in (0, 1):
        yield (
            f"{parts} reward_model.weight={reward.weight} and rule_weight={reward.rule_weight} have no effect: set "
            "them to 1.0 (rule_weight=0 for no reward function) and give algorithm.gdpo_reward_weights"
        )


def reward_model(config: Config) -> Messages:
    """What a reward model needs, and what cannot be scored by one."""
    reward = config.reward_model
    if not reward.enable:
        return
    if reward.model.path is None:
        yield (
            "reward_model.enable=True needs reward_model.model.path: give the folder of a sequence classifier with one "
            "label, or set enable=False"
        )
    if reward.weight == 0 and reward.rule_weight == 0:
        yield "reward_model.weight=0 and rule_weight=0 leave no reward: set one of them to 1.0, for example"
    if config.algorithm.adv_estimator == "remax":
        yield (
            "reward_model.enable=True scores samples, not remax's greedy baseline: set it to False or take another "
            "algorithm.adv_estimator"
        )
    turns = config.actor_rollout_ref.rollout.agent.max_turns
    if reward.model.input_tokenizer is not None and turns > 1:
        yield (
            f"reward_model.model.input_tokenizer renders one answer anew, but {_ROLLOUT}.agent.max_turns={turns}: set "
            "max_turns=1, or take a reward model with the policy's tokenizer and input_tokenizer=null"
        )


def reward_model_warnings(config: Config) -> Messages:
    """Settings of a reward model that a run does not have or that do not count."""
    reward, default = config.reward_model, Config().reward_model
    for name in ("model", "weight", "rule_weight", "max_length"):
        if not reward.enable and getattr(reward, name) != getattr(default, name):
            yield f"reward_model.{name} has no effect without reward_model.enable=True"
    if reward.enable and not config.scores_by_rule and config.custom_reward_function.path is not None:
        yield "custom_reward_function.path has no effect with reward_model.rule_weight=0: no reward function runs"


def warnings(config: Config) -> Messages:
    """What has no use, or counts twice."""
    loss, algorithm = config.actor_rollout_ref.actor.policy_loss.loss_mode, config.algorithm
    mode, fixed = config.actor_rollout_ref.actor.loss_agg_mode, FIXED_AGGREGATION.get(loss)
    if fixed is not None and mode not in (fixed, Config().actor_rollout_ref.actor.loss_agg_mode):
        yield (
            f"{_ACTOR}.loss_agg_mode={mode} holds for entropy and KL only: policy_loss.loss_mode={loss} is defined "
            f"with {fixed}; set loss_agg_mode={fixed}"
        )
    if loss not in GROUP_LOSSES:
        return
    if config.needs_critic:
        yield (
            f"{_ACTOR}.policy_loss.loss_mode={loss} reads no advantages, but algorithm.adv_estimator="
            f"{algorithm.adv_estimator} trains a critic for them: set adv_estimator=grpo"
        )
    if config.actor_rollout_ref.actor.use_kl_loss or algorithm.use_kl_in_reward:
        yield (
            f"{_ACTOR}.policy_loss.loss_mode={loss} holds the policy near the reference by itself: with "
            f"{_ACTOR}.use_kl_loss or algorithm.use_kl_in_reward the KL counts twice"
        )
