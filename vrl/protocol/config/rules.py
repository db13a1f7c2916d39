"""Rules across keys, checked before anything starts: by the command line, and by a test for every file in configs/.

Every message names the keys, the numbers and a value that would do. What the protocol layer cannot know comes from the
caller: the machine (`Machine`), the model's head counts (`check_heads`).
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import final

from vrl.protocol.config import (
    algorithm_rules,
    checkpoint_rules,
    learner_rules,
    lora_rules,
    package_rules,
    pool_rules,
)
from vrl.protocol.config.names import (
    ADV_ESTIMATORS,
    GROUP_ESTIMATORS,
    KL_ESTIMATORS,
    LOGGERS,
    LOSS_AGG_MODES,
    POLICY_LOSSES,
    VALUE_ESTIMATORS,
)
from vrl.protocol.config.pool_rules import largest_divisor
from vrl.protocol.config.ranges import range_errors, value_of
from vrl.protocol.config.schema import Config
from vrl.protocol.errors import ConfigError

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
MAX_TEMPERATURE = 2.0  # vLLM refuses more

# Taken because verl's files have them; a value of one's own gets a warning. Most are for episodes of several turns.
WITHOUT_EFFECT = (
    f"{_MODEL}.external_lib",
    f"{_ACTOR}.checkpoint.load_contents",
    "critic.model.external_lib",
    "critic.checkpoint.load_contents",
    "reward_model.reward_manager",
    "trainer.balance_batch",
)

Messages = Iterator[str]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a node has."""

    gpus: int
    cores: int
    packages: Collection[str] = ()  # those of `package_rules.OPTIONAL` that can be imported


def check(config: Config, machine: Machine | None = None) -> tuple[str, ...]:
    """Return the warnings; without a machine, what needs one is not checked.

    Raises ConfigError with all faults, one a line.
    """
    errors = list(range_errors(config))
    if not errors:  # the rules divide by sizes, so they need these in range
        errors = [message for rule in ERROR_RULES for message in rule(config)]
        errors += _machine_errors(config, machine) if machine else ()
    if errors:
        raise ConfigError("\n".join(errors))
    warnings = [message for rule in WARNING_RULES for message in rule(config)]
    return (*warnings, *(_machine_warnings(config, machine) if machine else ()))


def check_heads(query_heads: int, kv_heads: int, size: int, key: str) -> None:
    """Refuse a parallel size (sequence or tensor) that the attention heads do not fit; `key` names its setting.

    Query heads must divide evenly; key-value heads must divide evenly or be repeated evenly.
    """
    if heads_fit(query_heads, kv_heads, size):
        return
    fitting = [str(other) for other in range(1, query_heads + 1) if heads_fit(query_heads, kv_heads, other)]
    raise ConfigError(
        f"{key}={size} does not fit a model with {query_heads} query and {kv_heads} key-value heads: "
        f"set it to {_one_of(fitting)}"
    )


def heads_fit(query_heads: int, kv_heads: int, size: int) -> bool:
    """Whether the heads can be spread over `size` ranks."""
    return query_heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def _one_of(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"


def _names(config: Config) -> Messages:
    actor = config.actor_rollout_ref.actor
    settings = [
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, ADV_ESTIMATORS),
        ("algorithm.kl_penalty", config.algorithm.kl_penalty, KL_ESTIMATORS),
        (f"{_ACTOR}.policy_loss.loss_mode", actor.policy_loss.loss_mode, POLICY_LOSSES),
        (f"{_ACTOR}.loss_agg_mode", actor.loss_agg_mode, LOSS_AGG_MODES),
        (f"{_ACTOR}.kl_loss_type", actor.kl_loss_type, KL_ESTIMATORS),
        ("critic.loss_agg_mode", config.critic.loss_agg_mode, LOSS_AGG_MODES),
        *(("trainer.logger", logger, LOGGERS) for logger in config.trainer.logger),
    ]
    for key, name, known in settings:
        if name not in known:
            yield f"{key}={name} is not known; there are {', '.join(sorted(known))}"


def _files(config: Config) -> Messages:
    if not config.actor_rollout_ref.model.path:
        yield f"{_MODEL}.path is empty: give a model folder"
    if not config.data.train_files and not config.trainer.val_only:
        yield "data.train_files is empty: give parquet or jsonl files, data.train_files=[a.parquet,b.parquet]"
    if not config.data.val_files and (config.trainer.val_only or config.trainer.test_freq > 0):
        wish = "trainer.val_only=True" if config.trainer.val_only else f"trainer.test_freq={config.trainer.test_freq}"
        yield f"{wish} needs held-out rows, but data.val_files is empty: give files or set test_freq=-1, val_only=False"
    if config.warm_start.enable and not config.warm_start.files:
        yield "warm_start.enable=True needs warm_start.files: give files or set enable=False"
    if config.data.custom_cls.path and not config.data.custom_cls.name:
        yield "data.custom_cls.path needs data.custom_cls.name: give the class in that file"


def _batch(config: Config) -> Messages:
    total = config.data.train_batch_size
    sizes = [(f"{_ACTOR}.ppo_mini_batch_size", config.actor_rollout_ref.actor.ppo_mini_batch_size)]
    if config.needs_critic and config.critic.ppo_mini_batch_size is not None:
        sizes.append(("critic.ppo_mini_batch_size", config.critic.ppo_mini_batch_size))
    for key, size in sizes:
        if total % size:
            yield (
                f"data.train_batch_size={total} prompts cannot be cut into mini-batches of {key}={size} prompts: "
                f"set {key}={largest_divisor(total, size)}, or train_batch_size={max(1, round(total / size)) * size}"
            )


def _engine(config: Config) -> Messages:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "hf" and rollout.tensor_model_parallel_size > 1:
        yield (
            f"{_ROLLOUT}.name=hf runs on one rank, but tensor_model_parallel_size="
            f"{rollout.tensor_model_parallel_size}: set tensor_model_parallel_size=1 or name=vllm"
        )


def _lengths(config: Config) -> Messages:
    rollout = config.actor_rollout_ref.rollout
    prompt, response, context = config.data.max_prompt_length, config.data.max_response_length, config.max_model_len
    if prompt + response > context:
        yield (
            f"data.max_prompt_length={prompt} + data.max_response_length={response} = {prompt + response} tokens, "
            f"more than {_ROLLOUT}.max_model_len={context}: set max_model_len={prompt + response} or null"
        )
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < context:
        yield (
            f"{_ROLLOUT}.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than the context of "
            f"{context} tokens: set max_num_batched_tokens={context} or enable_chunked_prefill=True"
        )
    pixels = config.actor_rollout_ref.model
    if pixels.min_pixels and pixels.max_pixels and pixels.min_pixels > pixels.max_pixels:
        yield (
            f"{_MODEL}.min_pixels={pixels.min_pixels} is more than max_pixels={pixels.max_pixels}: "
            f"set min_pixels={pixels.max_pixels} or less"
        )


def _sampling(config: Config) -> Messages:
    rollout, val = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.val_kwargs
    if not 0 < rollout.temperature <= MAX_TEMPERATURE:
        yield (
            f"{_ROLLOUT}.temperature={rollout.temperature}: training needs more than 0 and at most "
            f"{MAX_TEMPERATURE:g}, for example 1.0 (greedy evaluation is val_kwargs.temperature=0)"
        )
    if not 0 <= val.temperature <= MAX_TEMPERATURE:
        yield f"{_ROLLOUT}.val_kwargs.temperature={val.temperature}: 0 (greedy) to {MAX_TEMPERATURE:g} is wanted"
    if (rollout.top_p < 1 or rollout.top_k != -1) and config.algorithm.rollout_correction.rollout_is is None:
        yield (
            f"{_ROLLOUT}.top_p={rollout.top_p}, top_k={rollout.top_k}: truncated sampling makes the engine's "
            "probabilities differ from the learner's; set top_p=1 and top_k=-1, or switch on rollout correction "
            "(algorithm.rollout_correction.rollout_is)"
        )
    correction = config.algorithm.rollout_correction
    if correction.rollout_rs is not None and correction.rollout_rs_threshold is None:
        yield (
            f"algorithm.rollout_correction.rollout_rs={correction.rollout_rs} needs rollout_rs_threshold: "
            "give the largest value kept, or set rollout_rs=null"
        )


def _resume(config: Config) -> Messages:
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode == "resume_path" and path is None:
        yield (
            "trainer.resume_mode=resume_path needs trainer.resume_from_path: give a global_step_N folder, "
            "or set resume_mode=auto"
        )
    if mode != "resume_path" and path is not None:
        yield f"trainer.resume_from_path={path} is not read with trainer.resume_mode={mode}: set it to resume_path"


def _sandbox(config: Config) -> Messages:
    sandbox = config.actor_rollout_ref.rollout.multi_turn.sandbox
    if sandbox.kind == "remote" and not (sandbox.url or "").startswith(("http://", "https://")):
        yield (
            f"{_ROLLOUT}.multi_turn.sandbox.kind=remote needs the address of a Sandbox Fusion server in "
            f"{_ROLLOUT}.multi_turn.sandbox.url, such as http://localhost:8080; got {sandbox.url}"
        )


def _not_supported(config: Config) -> Messages:
    """Settings of verl whose names are taken but that this version does not carry out."""
    if config.data.custom_cls.path is not None:
        yield "data.custom_cls.path is not supported in this version: set it to null, convert the rows to verl's format"


ERROR_RULES: tuple[Callable[[Config], Messages], ...] = (
    _names,
    _files,
    _batch,
    learner_rules.micro_batches,
    learner_rules.attention,
    pool_rules.parallel,
    _engine,
    _lengths,
    _sampling,
    algorithm_rules.losses,
    algorithm_rules.critic_warmup,
    algorithm_rules.rewards,
    algorithm_rules.reward_model,
    algorithm_rules.gdpo,
    algorithm_rules.group_losses,
    algorithm_rules.filter_groups,
    algorithm_rules.zero_variance,
    lora_rules.modules,
    lora_rules.adapter,
    _resume,
    _sandbox,
    _not_supported,
)


def uses_gpu(config: Config, machine: Machine) -> bool:
    """Whether ranks get a GPU each, after `trainer.device=auto` is decided."""
    return config.trainer.device == "cuda" or (config.trainer.device == "auto" and machine.gpus > 0)


def _machine_errors(config: Config, machine: Machine) -> Messages:
    ranks = config.trainer.n_gpus_per_node
    yield from package_rules.errors(config, machine.packages, gpu=uses_gpu(config, machine))
    if not uses_gpu(config, machine):
        return
    if machine.gpus == 0:
        yield "trainer.device=cuda, but this machine has no GPU: set trainer.device=cpu"
    elif ranks > machine.gpus:
        yield f"trainer.n_gpus_per_node={ranks}, but this machine has {machine.gpus} GPUs: set it to {machine.gpus}"
    elif config.ranks_per_node > machine.gpus and config.ray_kwargs.ray_init.address is None:
        yield pool_rules.too_few_gpus(config, machine.gpus)


def _machine_warnings(config: Config, machine: Machine) -> Messages:
    wanted = config.ranks_per_node * config.trainer.cpu_threads_per_rank
    if not uses_gpu(config, machine) and wanted > machine.cores:
        beside = f" and {config.ranks_per_node - config.trainer.n_gpus_per_node} of other pools" * bool(
            config.own_pools
        )
        yield (
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node} ranks{beside} of cpu_threads_per_rank="
            f"{config.trainer.cpu_threads_per_rank} on {machine.cores} cores: ranks will share cores and be slow"
        )


def _group_warnings(config: Config) -> Messages:
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if estimator in GROUP_ESTIMATORS and n == 1:
        yield (
            f"algorithm.adv_estimator={estimator} compares the samples of a prompt, but {_ROLLOUT}.n=1: "
            "a group of one has no baseline; set n=8, for example"
        )
    if config.algorithm.gdpo_reward_keys and estimator != "gdpo":
        yield f"algorithm.gdpo_reward_keys has no effect with algorithm.adv_estimator={estimator}: set gdpo or no keys"
    if config.critic.enable and estimator not in VALUE_ESTIMATORS:
        yield f"critic.enable=True, but algorithm.adv_estimator={estimator} does not use its values: set it to null"
    if config.actor_rollout_ref.actor.use_kl_loss and config.algorithm.use_kl_in_reward:
        yield f"{_ACTOR}.use_kl_loss and algorithm.use_kl_in_reward are both on: the KL counts twice, one is usual"


def _effect_warnings(config: Config) -> Messages:
    defaults = Config()
    for key in WITHOUT_EFFECT:
        if value_of(config, key) != value_of(defaults, key):
            yield f"{key}={value_of(config, key)} has no effect in this version"


def _agent_warnings(config: Config) -> Messages:
    agent = config.actor_rollout_ref.rollout.agent
    if agent.environments and agent.max_turns == 1:
        yield (
            f"{_ROLLOUT}.agent.environments is set, but agent.max_turns=1: no model sees what an environment answers; "
            "set max_turns=4, for example"
        )


def _run_warnings(config: Config) -> Messages:
    trainer = config.trainer
    roles = {
        _ACTOR: config.actor_rollout_ref.actor.fsdp_config,
        "actor_rollout_ref.ref": config.actor_rollout_ref.ref.fsdp_config,
        "critic": config.critic.fsdp_config,
        "reward_model": config.reward_model.fsdp_config,
    }
    for role, fsdp in roles.items():
        if trainer.device == "cpu" and (fsdp.param_offload or fsdp.optimizer_offload):
            yield f"{role}.fsdp_config: a CPU has one memory, so offload moves nothing; set it to False"
    if trainer.nnodes > 1 and config.ray_kwargs.ray_init.address is None:
        yield f"trainer.nnodes={trainer.nnodes}: start a Ray cluster first and set ray_kwargs.ray_init.address=auto"
    if trainer.val_before_train and not config.data.val_files:
        yield "data.val_files is empty: nothing is evaluated"
    val = config.actor_rollout_ref.rollout.val_kwargs
    if val.n > 1 and val.effective_temperature == 0:
        yield (
            f"{_ROLLOUT}.val_kwargs.n={val.n} with do_sample={val.do_sample} and temperature={val.temperature} gives "
            f"{val.n} times the same greedy answer: set do_sample=True and temperature=1.0, or n=1"
        )
    correction = config.algorithm.rollout_correction
    cap = correction.rollout_is_threshold
    if correction.rollout_is is not None and isinstance(cap, float) and cap < 1:
        yield (
            f"algorithm.rollout_correction.rollout_is_threshold={cap} is a cap below 1: every weight is lowered; "
            "a band is text in quotes, as in '0.5_2' (without quotes YAML reads 0.52)"
        )
    if config.data.gen_batch_size is not None and not config.algorithm.filter_groups.enable:
        yield "data.gen_batch_size has no effect without algorithm.filter_groups.enable"


WARNING_RULES: tuple[Callable[[Config], Messages], ...] = (
    _group_warnings,
    algorithm_rules.reward_model_warnings,
    algorithm_rules.warnings,
    pool_rules.warnings,
    learner_rules.size_warnings,
    _effect_warnings,
    _agent_warnings,
    _run_warnings,
    checkpoint_rules.left_out,
    lora_rules.unused,
    lora_rules.reference,
)
