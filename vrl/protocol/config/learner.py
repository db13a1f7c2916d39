"""Settings of the roles that hold a model in FSDP: actor, reference, critic."""

from dataclasses import dataclass, field
from typing import Literal, final

from vrl.protocol.config.model import CheckpointConfig, FsdpConfig, OpenDict, OptimConfig, ResourcePoolConfig


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossConfig:
    """Which policy loss, and what it takes beside the clip ranges."""

    loss_mode: str = "vanilla"  # name in the registry of policy losses
    clip_cov_ratio: float = 2e-4  # clip_cov: share of the tokens that lose their gradient
    clip_cov_lb: float = 1.0  # clip_cov: covariance above which a token may be chosen
    clip_cov_ub: float = 5.0  # clip_cov: covariance below which a token may be chosen
    kl_cov_ratio: float = 2e-4  # kl_cov: share of the tokens that pay for moving
    ppo_kl_coef: float = 0.1  # kl_cov: what they pay a nat
    dro_beta: float = 0.1  # dro: weight of the squared log-ratio, above 0
    tba_beta: float = 0.012  # tba: KL coefficient, in reward a nat, above 0
    dpo_beta: float = 0.1  # dpo: KL coefficient, in reward a nat, above 0
    dpo_loss_type: Literal["sigmoid", "ipo"] = "sigmoid"  # dpo: log-sigmoid of the margin, or its squared distance
    dpo_label_smoothing: float = 0.0  # dpo: share of preferences taken as flipped, below 0.5; not with ipo


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ActorConfig:
    """The policy's update."""

    ppo_mini_batch_size: int = 256  # prompts an optimizer step, over all ranks
    ppo_micro_batch_size_per_gpu: int | None = None  # rows a micro-batch when use_dynamic_bsz is off
    use_dynamic_bsz: bool = True  # cut micro-batches by tokens, for all roles
    ppo_max_token_len_per_gpu: int = 16384  # tokens a micro-batch and rank
    use_prefix_grouper: bool = False  # compute a prompt once for its samples, in actor, reference and critic
    ppo_epochs: int = 1  # passes over the rows of a step
    shuffle: bool = False  # mini-batches in a new order each epoch, from trainer.seed
    grad_clip: float = 1.0  # largest gradient norm
    clip_ratio: float = 0.2  # PPO clip range
    clip_ratio_low: float | None = None  # below 1; null: clip_ratio
    clip_ratio_high: float | None = None  # above 1; null: clip_ratio
    clip_ratio_c: float = 3.0  # dual clip for negative advantages, above 1
    tau_pos: float = 1.0  # sapo: slope of the gate for positive advantages, above 0
    tau_neg: float = 1.05  # sapo: slope of the gate for negative advantages, above 0
    loss_agg_mode: str = "token-mean"  # how token losses become one number
    loss_scale_factor: float | None = None  # tokens; divisor of seq-mean-token-sum-norm; null: max_response_length
    entropy_coeff: float = 0.0  # weight of the entropy bonus
    entropy_from_logits_chunk_size: int = 2048  # tokens whose logits exist at a time (log-probs and entropy)
    use_kl_loss: bool = False  # KL to the reference as a loss term
    kl_loss_coef: float = 0.001  # its weight
    kl_loss_type: str = "low_var_kl"  # its estimator
    ulysses_sequence_parallel_size: int = 1  # ranks that share a row
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def clip_low(self) -> float:
        """Lower clip range: the ratio is held above 1 - clip_low."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Upper clip range: the ratio is held below 1 + clip_high."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RefConfig:
    """The frozen reference policy. It exists when a KL term is on or the policy loss compares with it."""

    log_prob_micro_batch_size_per_gpu: int | None = None  # rows when use_dynamic_bsz is off; null: the actor's
    log_prob_max_token_len_per_gpu: int | None = None  # tokens a micro-batch and rank; null: the actor's
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    resource_pool: ResourcePoolConfig = field(default_factory=ResourcePoolConfig)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CriticModelConfig:
    """The critic's backbone: a model folder without or with a value head. Tokenizer and images are the policy's."""

    path: str | None = None  # folder or hub name; null: the actor's
    override_config: OpenDict = field(default_factory=OpenDict)  # open: replaces fields of the model's config.json
    trust_remote_code: bool = False  # run python files of the model folder
    external_lib: str | None = None  # module imported before the model is loaded
    enable_gradient_checkpointing: bool = True  # recompute activations in the backward pass
    enable_activation_offload: bool = False  # what the backward pass needs waits in host memory
    use_liger: bool = False  # Liger's Triton kernels for RMSNorm and SwiGLU, on a GPU
    freeze_vision_tower: bool = False  # no gradient for the vision tower
    lora_rank: int = 0  # of the adapters that learn in place of all weights; 0: no LoRA
    lora_alpha: int = 16  # the adapters' output counts lora_alpha / lora_rank times
    target_modules: str | tuple[str, ...] = "all-linear"  # adapted: decoder's linear layers; names, or a pattern
    exclude_modules: str | tuple[str, ...] | None = None  # not adapted: names or their ends, or a pattern
    lora_adapter_path: str | None = None  # adapter folder in peft's format to go on from; null: new ones

    @property
    def uses_lora(self) -> bool:
        """Whether adapters learn and the model itself is frozen."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig:
    """The value model. It exists when the estimator needs values."""

    enable: bool | None = None  # null: when algorithm.adv_estimator needs values
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    ppo_mini_batch_size: int | None = None  # prompts an optimizer step; null: the actor's
    ppo_micro_batch_size_per_gpu: int | None = None  # rows when use_dynamic_bsz is off; null: the actor's
    ppo_max_token_len_per_gpu: int | None = None  # tokens a micro-batch and rank; null: the actor's
    ppo_epochs: int | None = None  # passes over the rows of a step; null: the actor's
    ulysses_sequence_parallel_size: int = 1  # ranks that share a row
    grad_clip: float = 1.0  # largest gradient norm
    cliprange_value: float = 0.5  # largest change of a value an update, in units of the return
    loss_agg_mode: str = "token-mean"  # how token losses become one number
    resource_pool: ResourcePoolConfig = field(default_factory=ResourcePoolConfig)
