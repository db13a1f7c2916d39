"""What a rollout starts from and what it returns: prompts, sampling settings, trajectories. Torch-free.

The data layer makes `Prompt`s, the turn loop of a rollout worker makes `Trajectory`s of them, and
`protocol.rows` turns finished groups of trajectories into a `DataProto`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

IMAGE_MARK: Final = "<image>"  # stands for an image in the text of all but assistant messages


class StopReason(StrEnum):
    """Why an episode ended."""

    ANSWER = "answer"  # the model ended its last turn by itself
    LENGTH = "length"  # a turn ran into its token limit
    CONTEXT_FULL = "context_full"  # no room for another turn
    MAX_TURNS = "max_turns"
    TIME_LIMIT = "time_limit"
    ENV_DONE = "env_done"  # the environment or tool ended it
    IMAGE_LIMIT = "image_limit"  # an observation would have brought more images than are allowed
    FAILED = "failed"  # an error outside the model: never trained, never part of its group


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One draw of a dataset row; its n samples form one group.

    `uid` names the draw (unique in a run), `row_id` the dataset row. `images` holds the encoded images
    (PNG or JPEG bytes as in the data file) in the order of the `<image>` marks in `messages`.
    """

    row_id: str
    uid: str
    messages: Sequence[Mapping[str, Any]]
    images: tuple[bytes, ...] = ()
    data_source: str = "unknown"
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    env_name: str | None = None
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample a turn. Everything that is not set here is neutral, whatever the model folder says."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    max_tokens: int = 512  # a turn
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False  # sample to the limit, for measurements
    n: int = 1  # samples a prompt
    seed: int = 0  # of the run; each request's seed is derived by `request_seed`

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken instead of a sample."""
        return self.temperature == 0.0


def request_seed(run_seed: int, step: int, uid: str, sample_index: int, turn: int = 0, retry: int = 0) -> int:
    """Return the seed of one engine request: equal arguments give equal tokens, whatever runs beside it."""
    text = f"{run_seed}/{step}/{uid}/{sample_index}/{turn}/{retry}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") & 0x7FFFFFFF


def content_key(data: bytes) -> str:
    """Return the key of a blob: the SHA-256 of its bytes."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished episode: prompt, model turns and observations in the order they happened.

    All per-token sequences have the length of `input_ids`. Image placeholders are expanded (one id per
    visual token). `loss_mask` is 1 exactly on ids that the engine sampled; `rollout_log_probs` is 0 and
    `policy_versions` is -1 elsewhere. `turn_ids` is k on the sampled tokens of turn k, -1 elsewhere.

    `response_text` is what reward functions get. Without an environment it is the decoded answer; with one it is the
    whole conversation behind the prompt, special tokens and observations included, an image as one placeholder.
    """

    prompt: Prompt
    sample_index: int
    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    rollout_log_probs: tuple[float, ...]
    turn_ids: tuple[int, ...]
    policy_versions: tuple[int, ...]
    prompt_length: int
    stop_reason: StopReason
    prompt_text: str
    response_text: str
    images: tuple[bytes, ...] = ()  # of the whole row, in order
    turn_rewards: tuple[float, ...] = ()  # a number a turn, by the environment; empty without one
    turn_info: tuple[Mapping[str, Any], ...] = ()  # what the environment reported of each turn, and its seconds
    turn_states: tuple[str, ...] = ()  # a hash of what the model saw before each turn: the prompt, then observations
    score: float = 0.0  # of the outcome; turn rewards come on top
    score_extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    retries: int = 0  # earlier tries of this episode that failed outside the model
    failure: str | None = None  # traceback or reason when stop_reason is FAILED

    def __post_init__(self) -> None:
        lengths = {
            "input_ids": len(self.input_ids),
            "loss_mask": len(self.loss_mask),
            "rollout_log_probs": len(self.rollout_log_probs),
            "turn_ids": len(self.turn_ids),
            "policy_versions": len(self.policy_versions),
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(f"sample {self.traj_uid}: per-token lists drifted apart: {lengths}")

    @property
    def traj_uid(self) -> str:
        """Name of the episode, unique in a run."""
        return f"{self.prompt.uid}/{self.sample_index}"

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the engine sampled."""
        return sum(self.loss_mask)
