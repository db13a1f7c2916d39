"""Settings of the run itself: machine, length, logs, checkpoints, and what comes before RL."""

from dataclasses import dataclass, field
from typing import Literal, final

ModelRecipe = Literal["tiny_qwen2_5_vl", "tiny_qwen2", "tiny_agent", "smollm2"]
DataRecipe = Literal["tiny", "tiny_agent", "reasoning_gym"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """Machine, length, logs and checkpoints."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda when there is a GPU
    n_gpus_per_node: int = 1  # ranks a node; on a CPU: processes
    nnodes: int = 1  # machines
    cpu_threads_per_rank: int = 1  # cores pinned to a rank on a CPU
    worker_start_timeout: float = 300.0  # seconds until all worker processes must be up
    total_epochs: int = 30  # passes over the training rows
    total_training_steps: int | None = None  # steps; null: by total_epochs
    project_name: str = "vrl"  # folder and wandb project
    experiment_name: str | None = None  # folder and wandb run; null: config name and start time
    default_local_dir: str | None = None  # run folder; null: outputs/<project_name>/<experiment_name>
    logger: tuple[str, ...] = ("console",)  # console, tensorboard, wandb; metrics.jsonl is always written
    rollout_data_dir: str | None = None  # folder of the readable rollouts; null: rollouts in the run folder
    validation_data_dir: str | None = None  # folder of the readable evaluations; null: validation in the run folder
    log_val_generations: int = 0  # evaluated rows in the loggers
    val_before_train: bool = True  # evaluate before the first step
    val_only: bool = False  # evaluate and end
    test_freq: int = -1  # steps between evaluations; -1: only before and after
    save_freq: int = -1  # steps between checkpoints; -1: only at the end
    max_actor_ckpt_to_keep: int | None = None  # newest checkpoints kept; null: all
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"  # auto: from the newest whole checkpoint
    resume_from_path: str | None = None  # checkpoint folder (global_step_N) for resume_path
    balance_batch: bool = True  # equal tokens on all ranks
    critic_warmup: int = 0  # steps in which only the critic learns
    deterministic: bool = False  # timing has no influence on results; slower
    seed: int = 1  # of everything that has no seed of its own
    max_nonfinite_steps: int = 10  # optimizer steps in a row with a gradient that is not finite, then the run stops
    max_steps_without_samples: int = 3  # steps in a row without a usable row, then the run stops


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStartConfig:
    """Supervised steps before RL, through the same learner; the result is cached by content."""

    enable: bool = False  # on or off
    files: tuple[str, ...] = ()  # parquet or jsonl files with whole conversations
    messages_key: str = "messages"  # column of the conversation; its assistant messages are learnt
    steps: int = 200  # optimizer steps at most
    stop_probability: float | None = None  # data sources whose answers are this probable pause; all of them: the end
    batch_size: int = 64  # rows an optimizer step
    lr: float = 1e-3  # peak learning rate
    lr_warmup_steps: int = 10  # optimizer steps
    cache_dir: str = "outputs/warm_start"  # folder of finished warm starts


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareConfig:
    """What is made first when its files are missing."""

    model: ModelRecipe | None = None  # builds the folder actor_rollout_ref.model.path
    data: DataRecipe | None = None  # writes data.train_files, data.val_files and warm_start.files, all in one folder
    seed: int = 0  # of both


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RayInitConfig:
    """Arguments of ray.init."""

    address: str | None = None  # of a running cluster ("auto": found); null: start one here
    num_cpus: int | None = None  # cores Ray may use; null: as many as the ranks need


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RayKwargsConfig:
    """Ray."""

    ray_init: RayInitConfig = field(default_factory=RayInitConfig)
