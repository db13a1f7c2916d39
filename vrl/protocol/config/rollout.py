"""Settings of generation: engine, sampling, episodes (`actor_rollout_ref.rollout.*`)."""

from dataclasses import dataclass, field
from typing import Literal, final

from vrl.protocol.config.model import OpenDict
from vrl.protocol.config.sandbox import SandboxConfig


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ValKwargsConfig:
    """Sampling in evaluation."""

    do_sample: bool = False  # off: greedy, whatever the temperature
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # probability mass; 1: off
    top_k: int = -1  # tokens; -1: off
    n: int = 1  # samples a prompt

    @property
    def effective_temperature(self) -> float:
        """What the engine is asked for: 0 when sampling is off."""
        return self.temperature if self.do_sample else 0.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig:
    """Limits of an episode."""

    max_turns: int = 1  # model turns
    single_response_max_tokens: int | None = None  # tokens a turn; null: what is left of the response
    custom_stop: tuple[str, ...] = ()  # strings that end a turn
    concurrent_workers: int = 2  # tool processes a rollout worker
    episode_timeout: float | None = None  # seconds of wall clock an episode; null: 600 with an environment, else 7200
    max_images: int = 8  # images that the observations of an episode bring; one more ends it
    max_image_pixels: int = 16777216  # pixels an image of an observation; a larger one becomes a text that says so
    max_retries: int = 1  # new tries of an episode that failed outside the model
    max_failed_ratio: float = 0.5  # share of failed episodes in a step that stops the run
    environments: OpenDict = field(default_factory=OpenDict)  # open: {env_name: {class, config}}, beside those built in

    def max_seconds(self, *, acts: bool) -> float:
        """Return the limit of an episode. A plain one, which cannot hang in a tool, has time for a long thought."""
        if self.episode_timeout is not None:
            return self.episode_timeout
        return 600.0 if acts else 7200.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class MultiTurnConfig:
    """Tools of an episode."""

    tool_config_path: str | None = None  # yaml file that lists the tools
    format: str = "hermes"  # parser of tool calls
    max_parallel_calls: int = 1  # calls a turn that run
    max_tool_response_length: int = 256  # characters of a tool's answer
    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"  # which part of it is cut
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEngineConfig:
    """How weights travel from the learner to the engine."""

    update_weights_bucket_megabytes: int = 2048  # megabytes of full parameters at a time


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """The engine and how it samples in training."""

    name: Literal["vllm", "hf"] = "vllm"  # engine; hf: transformers' generate, for tests and machines without vLLM
    temperature: float = 1.0  # above 0
    top_p: float = 1.0  # probability mass; 1: off
    top_k: int = -1  # tokens; -1: off
    n: int = 1  # samples a prompt (the group of GRPO)
    ignore_eos: bool = False  # sample to the length limit, for measurements
    tensor_model_parallel_size: int = 1  # ranks an engine
    gpu_memory_utilization: float = 0.5  # share of a GPU's memory
    kv_cache_gib: float = 1.0  # GiB of KV cache an engine on a CPU
    max_model_len: int | None = None  # tokens of context; null: max_prompt_length + max_response_length
    max_num_seqs: int = 256  # rows that decode together in an engine
    max_num_batched_tokens: int = 8192  # tokens an engine step
    enforce_eager: bool = False  # no CUDA graphs
    enable_prefix_caching: bool = True  # share the KV cache of equal prefixes
    enable_chunked_prefill: bool = True  # long prompts in pieces between decode steps
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # auto: bfloat16 on GPU, float32 on CPU
    free_cache_engine: bool = True  # the engine gives its memory back while the learner works
    seed: int | None = None  # of sampling; null: trainer.seed
    limit_images: int | None = None  # images a row; null: of the row that has most, and agent.max_images with tools
    log_prob_micro_batch_size_per_gpu: int | None = None  # rows, for old log-probs; null: the actor's
    log_prob_max_token_len_per_gpu: int | None = None  # tokens, for old log-probs; null: the actor's
    checkpoint_engine: CheckpointEngineConfig = field(default_factory=CheckpointEngineConfig)
    engine_kwargs: OpenDict = field(default_factory=OpenDict)  # open: {vllm: {...}}, passed to the engine as it is
    val_kwargs: ValKwargsConfig = field(default_factory=ValKwargsConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
