"""Settings of advantage, KL and reward (`algorithm.*`, `reward_model.*`, `custom_reward_function.*`)."""

from dataclasses import dataclass, field
from typing import Literal, final

from vrl.protocol.config.model import FsdpConfig, OpenDict, ResourcePoolConfig


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class KlCtrlConfig:
    """The coefficient of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"  # adaptive: follows target_kl
    kl_coef: float = 0.001  # nats to reward
    horizon: int = 10000  # rows over which an adaptive coefficient doubles or halves
    target_kl: float = 0.1  # nats, adaptive only


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class FilterGroupsConfig:
    """DAPO: groups whose rewards are all equal are left out, and prompts are drawn until a step has all its groups."""

    enable: bool = False  # on or off
    metric: str | None = None  # what differs in a group: score (null), acc, seq_reward, seq_final_reward, part of score
    max_num_gen_batches: int = 0  # draws of prompts a step, data.gen_batch_size each; 0: 10

    @property
    def draws(self) -> int:
        """Most draws a step; verl's 0, no bound, can go on for ever on data that a policy solves or cannot solve."""
        return self.max_num_gen_batches or 10


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class GigpoConfig:
    """Group-in-group: episodes are compared, and turns that answer the same state."""

    step_advantage_w: float = 1.0  # weight of the advantage over equal states
    mode: Literal["mean_norm", "mean_std_norm"] = "mean_norm"  # less the mean, or also divided by the deviation


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutCorrectionConfig:
    """Importance weights between the engine that sampled and the learner, and rejection of what is too far off."""

    rollout_is: Literal["token", "sequence"] | None = None  # level of the weights; null: off
    rollout_is_threshold: float | str = 2.0  # largest weight; text "low_high": weights outside are 0 (quote it)
    rollout_is_batch_normalize: bool = False  # divide the weights by their mean
    rollout_rs: str | None = None  # statistics that reject tokens or rows, joined by commas; null: off
    rollout_rs_threshold: float | str | None = None  # largest value kept; k1: ratio u (1/u to u) or text "low_high"

    @property
    def enabled(self) -> bool:
        """Whether anything is corrected."""
        return self.rollout_is is not None or self.rollout_rs is not None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    """From scores to advantages."""

    adv_estimator: str = "gae"  # name in the registry of advantage estimators
    gamma: float = 1.0  # discount a sampled token
    lam: float = 1.0  # GAE's lambda
    norm_adv_by_std_in_grpo: bool = True  # off: Dr. GRPO
    grpo_turn_over_all_turns: bool = False  # compare a turn with all turns of its group; off: with those of its index
    high_level_gamma: float = 0.95  # bi_level_gae's discount a turn
    gigpo: GigpoConfig = field(default_factory=GigpoConfig)
    gdpo_reward_keys: tuple[str, ...] = ()  # parts of the score that the reward returns beside it, for gdpo
    gdpo_reward_weights: tuple[float, ...] | None = None  # one for each of gdpo_reward_keys; null: all 1
    use_kl_in_reward: bool = False  # subtract kl_coef * KL from the score of each sampled token
    kl_penalty: str = "kl"  # estimator of the KL in the reward
    kl_ctrl: KlCtrlConfig = field(default_factory=KlCtrlConfig)
    mask_truncated_completions: bool = False  # rows cut at a token limit train nothing, but count in their group
    zero_variance_filter: bool = False  # groups whose rewards are all equal are left out of the update, none are added
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongBufferConfig:
    """DAPO: responses that come near the limit lose some of their reward."""

    enable: bool = False  # on or off
    len: int = 0  # tokens before max_resp_len over which the penalty grows
    penalty_factor: float = 0.0  # reward lost at max_resp_len


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelFolderConfig:
    """The reward model: a Hugging Face folder with a sequence classifier of one label."""

    path: str | None = None  # folder or hub name, with its tokenizer where that is not the policy's
    input_tokenizer: str | None = None  # policy's tokenizer; set: rows are rendered anew by path's own; null: the same
    trust_remote_code: bool = False  # run python files of the model folder


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelConfig:
    """How rows are scored: by reward functions in processes of their own, by a reward model, or by both.

    A row's score is `rule_weight` times its reward function's plus `weight` times the reward model's.
    """

    enable: bool = False  # a reward model beside the reward function
    model: RewardModelFolderConfig = field(default_factory=RewardModelFolderConfig)
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    weight: float = 1.0  # of the reward model's score
    rule_weight: float = 1.0  # of the reward function's score beside it; 0: no reward function runs
    max_length: int | None = None  # tokens it reads, longer rows lose their beginning; null: its positions
    micro_batch_size_per_gpu: int | None = None  # rows when use_dynamic_bsz is off; null: by tokens
    forward_max_token_len_per_gpu: int | None = None  # tokens a micro-batch and rank; null: the actor's
    ulysses_sequence_parallel_size: int = 1  # ranks that share a row
    resource_pool: ResourcePoolConfig = field(default_factory=ResourcePoolConfig)
    reward_manager: str = "naive"  # taken for verl's files; the row's data_source says which function scores it
    reward_kwargs: OpenDict = field(default_factory=OpenDict)  # open: as custom_reward_function's, where that is empty
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    max_resp_len: int | None = None  # tokens where the overlong penalty is full; null: data.max_response_length
    reward_clip: float | None = None  # rewards are held within -x and x, after the overlong penalty; null: off
    num_workers: int = 2  # reward processes
    timeout: float = 30.0  # seconds a row; above it the process is killed
    on_failure: Literal["skip", "stop"] = "skip"  # a reward that raises, hangs, returns None: leave the row out, or end


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CustomRewardFunctionConfig:
    """A reward function of the user's own: (data_source, solution_str, ground_truth, extra_info, **kwargs)."""

    path: str | None = None  # python file, or vrl:NAME for a built-in rule; null: by data_source
    name: str = "compute_score"  # function in that file
    reward_kwargs: OpenDict = field(default_factory=OpenDict)  # open: further keyword arguments
