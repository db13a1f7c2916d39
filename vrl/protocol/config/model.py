"""Settings that several roles share: model folder, optimizer, sharding, checkpoint contents."""

from dataclasses import dataclass, field
from typing import Any, Literal, final

OpenDict = dict[str, Any]  # any keys below it are accepted; checked by who uses them
CheckpointPart = Literal["model", "optimizer", "extra", "hf_model"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The policy: a Hugging Face model folder and how it is loaded."""

    path: str = ""  # folder or hub name
    tokenizer_path: str | None = None  # folder of tokenizer and processor; null: path
    override_config: OpenDict = field(default_factory=OpenDict)  # open: replaces fields of the model's config.json
    trust_remote_code: bool = False  # run python files of the model folder
    external_lib: str | None = None  # module imported before the model is loaded
    enable_gradient_checkpointing: bool = True  # recompute activations in the backward pass
    enable_activation_offload: bool = False  # what the backward pass needs waits in host memory
    use_liger: bool = False  # Liger's Triton kernels for RMSNorm and SwiGLU, on a GPU
    freeze_vision_tower: bool = False  # no gradient for the vision tower
    min_pixels: int | None = None  # pixels an image at least, trainer and engine alike; null: the processor's
    max_pixels: int | None = None  # pixels an image at most, trainer and engine alike; null: the processor's
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
class OptimConfig:
    """AdamW and its learning-rate schedule. One scheduler step an optimizer step."""

    optimizer: Literal["AdamW", "DeepSpeedCPUAdam"] = "AdamW"  # or DeepSpeedCPUAdam: the same, in host memory
    lr: float = 1e-6  # peak learning rate
    betas: tuple[float, float] = (0.9, 0.999)  # decay of the first and second moment
    weight_decay: float = 0.01  # decoupled
    lr_warmup_steps: int = -1  # optimizer steps; -1: by lr_warmup_steps_ratio
    lr_warmup_steps_ratio: float = 0.0  # share of all optimizer steps
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"  # after the warm-up
    min_lr_ratio: float = 0.0  # of lr, where the cosine ends
    num_cycles: float = 0.5  # cosine periods; 0.5 falls once


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpConfig:
    """Sharding of one role. Master weights and optimizer state are float32."""

    fsdp_size: int = -1  # ranks a shard group; -1: all (below the world size: hybrid sharding)
    reshard_after_forward: bool = True  # free gathered parameters between forward and backward
    param_offload: bool = False  # parameters in host memory while the role is idle
    optimizer_offload: bool = False  # optimizer state in host memory while the role is idle
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of computation; auto: bfloat16 on GPU, float32 on CPU


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ResourcePoolConfig:
    """Processes of a role's own, beside those of `trainer`, with a world size of their own."""

    enable: bool = False  # off: the role lives in the processes of actor and rollout
    n_gpus_per_node: int = 1  # ranks a node of this pool; on a CPU: processes
    nnodes: int = 1  # machines of this pool


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What a role writes to and reads from a checkpoint."""

    save_contents: tuple[CheckpointPart, ...] = ("model", "optimizer", "extra")  # always; hf_model: also a model folder
    load_contents: tuple[CheckpointPart, ...] = ("model", "optimizer", "extra")  # what a resumed run reads
