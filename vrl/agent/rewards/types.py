"""Values that travel between a rollout worker and its reward processes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vrl.protocol.config.sandbox import SandboxConfig

# verl's signature, called by keyword: (data_source, solution_str, ground_truth, extra_info, **function_kwargs).
# It returns the score, or a dict with the score under `score` beside extra values for the log.
RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """What a reward process loads when it starts.

    With `function_path` a user's function scores every row (`custom_reward_function.path`, `.name`, `.reward_kwargs`);
    without it the rule of the row's data source does. `data_sources` are those the run will see: their rules are found
    at start, so that an unknown one is reported before training. `function_kwargs` go to whichever function scores.
    `sandbox` says where rules run a model's code. The pool sets `time_limit_seconds`, what one request may take.
    """

    data_sources: tuple[str, ...] = ()
    function_path: str | None = None
    function_name: str = "compute_score"
    function_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    time_limit_seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """One finished episode, as a reward function sees it.

    With an environment `solution_str` is the whole conversation behind the prompt, and `extra_info` also has the keys
    of `Episode.reward_prompt`. Built-in rules get the last turn as their `solution_str`.
    """

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """The outcome of one reward call.

    `extra` holds plain values only (numbers, strings, lists, dicts). `failure` is None when the call gave a score; else
    it says why not, as `kind: detail` with kind one of `raised`, `bad value`, `time limit`, `process died`. A failed
    call says nothing about the model: its row is counted and skipped, never trained with the 0 in `value`.
    """

    value: float
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    failure: str | None = None

    @classmethod
    def failed(cls, kind: str, detail: str) -> "Score":
        """Return the outcome of a call that gave no score."""
        return cls(0.0, {}, f"{kind}: {detail}")

    @property
    def failure_kind(self) -> str | None:
        """The part of `failure` to count by; None for a good score."""
        return None if self.failure is None else self.failure.partition(":")[0]
