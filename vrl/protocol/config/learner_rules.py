"""Rules of how learners cut and compute rows: micro-batches, attention, parts of sequences. `rules` runs them."""

from collections.abc import Iterator

from vrl.protocol.config.schema import Config

_ACTOR, _ROLLOUT, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_MODEL = "actor_rollout_ref.model"

Messages = Iterator[str]


def micro_batches(config: Config) -> Messages:
    """How many rows a micro-batch has where tokens do not say it."""
    if config.actor_rollout_ref.actor.use_dynamic_bsz:
        return
    if config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu is None:
        yield (
            f"{_ACTOR}.use_dynamic_bsz=False needs {_ACTOR}.ppo_micro_batch_size_per_gpu: "
            "give a number of rows, or set use_dynamic_bsz=True"
        )


def attention(config: Config) -> Messages:
    """What only vrl's own attention can do: look back into a prompt that rows share, and at parts of a sequence."""
    actor = config.actor_rollout_ref.actor
    models = [(_MODEL, config.actor_rollout_ref.model.override_config, "actor", _ACTOR)]
    if config.needs_critic:
        models.append(("critic.model", config.critic.model.override_config, "critic", "critic"))
    for section, override, role, owner in models:
        chosen = override.get("attn_implementation", "varlen")
        if chosen in ("varlen", "flash_attention_2"):
            continue
        key = f"{section}.override_config.attn_implementation={chosen}"
        if actor.use_prefix_grouper:
            yield (
                f"{key} cannot look back into a prompt that rows share: leave it out, or set "
                f"{_ACTOR}.use_prefix_grouper=False"
            )
        size = config.sequence_parallel_size(role)
        if size > 1:
            yield (
                f"{key} cannot compute a part of a sequence, as {owner}.ulysses_sequence_parallel_size={size} asks "
                f"for: leave it out, or set {owner}.ulysses_sequence_parallel_size=1"
            )


def size_warnings(config: Config) -> Messages:
    """Sizes that leave ranks idle, are exceeded by single rows, or do not count."""
    actor = config.actor_rollout_ref.actor
    if config.rows_per_step < config.data_parallel_size:
        yield (
            f"data.train_batch_size={config.data.train_batch_size} * rollout.n={config.actor_rollout_ref.rollout.n} = "
            f"{config.rows_per_step} rows a step leave some of {config.data_parallel_size} ranks idle"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    budgets = {
        f"{_ACTOR}.ppo_max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size
    }
    if config.needs_critic:
        budgets["critic.ppo_max_token_len_per_gpu"] = (
            config.critic_token_budget * config.critic.ulysses_sequence_parallel_size
        )
    for key, budget in budgets.items():
        if actor.use_dynamic_bsz and budget < longest:
            yield f"{key}: a row can have {longest} tokens, above the budget of {budget}; such a row is processed alone"
    if actor.use_prefix_grouper and config.actor_rollout_ref.rollout.n == 1:
        yield f"{_ACTOR}.use_prefix_grouper=True has no effect with rollout.n=1: no two rows have the same prompt"
    if actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is not None:
        yield (
            f"{_ACTOR}.ppo_micro_batch_size_per_gpu={actor.ppo_micro_batch_size_per_gpu} has no effect: "
            f"use_dynamic_bsz=True cuts micro-batches by ppo_max_token_len_per_gpu={actor.ppo_max_token_len_per_gpu}"
        )
    others = {
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": (
            config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu,
            "log_prob_max_token_len_per_gpu",
        ),
        f"{_REF}.log_prob_micro_batch_size_per_gpu": (
            config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu,
            "log_prob_max_token_len_per_gpu",
        ),
        "critic.ppo_micro_batch_size_per_gpu": (
            config.critic.ppo_micro_batch_size_per_gpu,
            "ppo_max_token_len_per_gpu",
        ),
    }
    for key, (rows, budget_key) in others.items():
        if actor.use_dynamic_bsz and rows is not None:
            yield f"{key}={rows} has no effect: use_dynamic_bsz=True cuts micro-batches by tokens ({budget_key})"
