"""Settings of the data files and of the loader (`data.*`)."""

from dataclasses import dataclass, field
from typing import Literal, final


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CustomClassConfig:
    """A dataset class of the user's own."""

    path: str | None = None  # python file; null: the built-in dataset
    name: str | None = None  # class in that file


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Which rows a run sees, and in what order."""

    train_files: tuple[str, ...] = ()  # parquet or jsonl files, one name or a list
    val_files: tuple[str, ...] = ()  # held-out files; none: no evaluation
    prompt_key: str = "prompt"  # column of the chat messages
    image_key: str = "images"  # column of the images (bytes, path or dict)
    reward_fn_key: str = "data_source"  # column that picks the reward and groups validation metrics
    max_prompt_length: int = 512  # tokens, after images are expanded
    max_response_length: int = 512  # tokens after the prompt, observations included
    train_batch_size: int = 1024  # prompts a step
    gen_batch_size: int | None = None  # prompts drawn at a time when groups are filtered; null: train_batch_size
    shuffle: bool = True  # new order each epoch, from `seed`
    seed: int | None = None  # of the order; null: trainer.seed
    filter_overlong_prompts: bool = True  # drop rows above max_prompt_length, counted in the log
    filter_overlong_prompts_workers: int = 1  # threads that measure prompts
    truncation: Literal["error", "left", "right", "middle"] = "error"  # of overlong prompts; with images error only
    train_max_samples: int = -1  # rows; -1: all
    val_max_samples: int = -1  # rows; -1: all
    bad_row: Literal["skip", "stop"] = "skip"  # a broken row: counted and skipped, or an error
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)
