"""Interfaces that lower layers need from above or from a sibling; implementations are injected when building.

`Renderer` is implemented once in `models/`; `Engine` twice in `workers/` (vLLM, Hugging Face);
`PromptSource` by the controller (a Ray actor shared by all replicas, or a fixed list), `TrajectorySink` by the rollout
worker and by tests. Scoring needs no port: the turn loop and the reward processes both live in `agent/`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vrl.protocol.trajectory import Prompt, Sampling, Trajectory

if TYPE_CHECKING:  # reward processes import this module and stay small
    import numpy as np


class Renderer(Protocol):
    """Messages to token ids and back in the model's own chat template; owns all that depends on the tokenizer."""

    banned_ids: tuple[int, ...]  # image, video and vision marks: never sampled
    eos_ids: tuple[int, ...]
    pad_id: int

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return prompt ids with the generation prompt; each `<image>` mark is one placeholder id.

        `tools` are OpenAI function schemas, shown to the model in the chat template's own way.
        """
        ...

    def observation_ids(self, messages: Sequence[Mapping[str, Any]], images: int, last_id: int) -> list[int]:
        """Return the ids from the end of a sampled turn to the next generation prompt, by the template's own form.

        They begin with the token that closes a turn, unless `last_id`, the last id of the sampled turn, is that token.
        In string content the first `images` marks `<image>` are images, one placeholder id each; all other text is
        text, whatever it spells: no special token, no image mark comes of it.

        Raises DataError when places and images differ, ConfigError when the template cannot be continued so.
        """
        ...

    def check_turns(self, roles: Mapping[str, str] | None = None) -> None:
        """Raise ConfigError unless the chat template can be continued turn by turn, also with these roles."""
        ...

    def check_image(self, data: bytes, max_pixels: int) -> None:
        """Raise DataError, with a reason that the model may read, unless an encoded image can be used."""
        ...

    def expand(self, ids: Sequence[int], images: Sequence[bytes]) -> list[int]:
        """Return ids with each image placeholder repeated to the number of its visual tokens.

        Raises DataError when marks and images differ in number or an image cannot be used.
        """
        ...

    def answer_ids(self, text: str) -> list[int]:
        """Return the ids of an assistant's answer with the token that ends its turn."""
        ...

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of ids; special tokens are left out unless asked for."""
        ...

    def positions(self, ids: Sequence[int], images: Sequence[bytes]) -> "np.ndarray | None":
        """Return the int64 `[T, 3]` positions of a finished, expanded row; None for models with 1-D positions."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One turn to sample. `ids` are unexpanded (one placeholder an image); `sampling.seed` is this request's own."""

    request_id: str
    ids: tuple[int, ...]
    images: tuple[bytes, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """A finished turn: the sampled ids with their log-probs (after ban and temperature) and why it ended."""

    request_id: str
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str  # "stop", "length" or "abort"


class Engine(Protocol):
    """Generates tokens. Driven from outside by `step()`; lives in the worker's process."""

    def add_request(self, request: EngineRequest) -> None:
        """Queue a turn; a later `step()` starts it when there is room."""
        ...

    def step(self) -> list[EngineOutput]:
        """Advance all running requests by one token; return those that finished."""
        ...

    def num_unfinished(self) -> int:
        """Return how many requests run or wait."""
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests without an output; unknown names are fine, they may just have finished."""
        ...

    def sleep(self) -> None:
        """Drop what runs, and give the memory of weights and KV cache back where the device can."""
        ...

    def wake(self, tags: Sequence[str]) -> None:
        """Take memory again: "weights" before they are loaded, "kv_cache" before the next step."""
        ...

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> int:
        """Write full tensors by Hugging Face name; return how many parameters were written.

        Raises EngineError when a parameter was not written or a name is unknown.
        """
        ...

    def reset_caches(self) -> None:
        """Drop what was computed with older weights, such as cached prefixes."""
        ...

    def close(self) -> None:
        """End the engine; it may take the process group with it, so it comes before leaving that."""
        ...


class PromptSource(Protocol):
    """Where replicas take work from."""

    def take(self, k: int) -> list[tuple[Prompt, int]]:
        """Return up to k (prompt, sample_index) pairs; empty when nothing is left."""
        ...


class TrajectorySink(Protocol):
    """Where replicas put finished trajectories."""

    def put(self, trajectories: Sequence[Trajectory]) -> None:
        """Take trajectories that are finished and scored, or failed; called as they come."""
        ...
