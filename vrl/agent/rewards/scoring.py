"""From a spec to a scorer, and from whatever a reward function returns to a `Score`. Runs inside a reward process."""

import math
import numbers
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, SupportsFloat

from vrl.agent.rewards.registry import find_rule
from vrl.agent.rewards.settings import check_rules_settings
from vrl.agent.rewards.types import RewardFunction, RewardRequest, RewardSpec, Score
from vrl.agent.rewards.user import load_user_function

_MAX_FAILURE_CHARACTERS = 4000


def make_scorer(spec: RewardSpec) -> Callable[[RewardRequest], Score]:
    """Load the functions of `spec` and return what scores one request with them. The scorer never raises.

    Raises ConfigError when a user's function cannot be loaded, a data source of `spec` has no rule, or none of their
    rules has a setting of that name.
    """
    function_of = _function_finder(spec)
    in_full = spec.function_path is not None
    for data_source in spec.data_sources:
        function_of(data_source)
    if spec.data_sources and not in_full:
        check_rules_settings(spec.data_sources, spec.function_kwargs, "custom_reward_function.reward_kwargs")

    def score(request: RewardRequest) -> Score:
        try:
            returned = function_of(request.data_source)(
                data_source=request.data_source,
                solution_str=request.solution_str if in_full else _last_turn(request),
                ground_truth=request.ground_truth,
                extra_info=request.extra_info,
                **spec.function_kwargs,
            )
            return score_of(returned)
        except (Exception, SystemExit):  # noqa: BLE001 - the process boundary: user code may raise anything, even sys.exit()
            return Score.failed("raised", traceback.format_exc()[-_MAX_FAILURE_CHARACTERS:])

    return score


def _function_finder(spec: RewardSpec) -> Callable[[str], RewardFunction]:
    if spec.function_path is None:
        return cache(find_rule)
    function = load_user_function(spec)

    def same_for_all(_data_source: str) -> RewardFunction:
        return function

    return same_for_all


def _last_turn(request: RewardRequest) -> str:
    """Return what the model said last: built-in rules must not find an answer in what a tool printed."""
    return str((request.extra_info or {}).get("last_turn", request.solution_str))


def score_of(returned: object) -> Score:
    """Read what a reward function returned: a finite number or a dict with one under `score`; the rest is a failure."""
    if not isinstance(returned, Mapping):
        return _number_score(returned, {})
    if "score" not in returned:
        return Score.failed("bad value", f"the returned dict has no 'score', only {sorted(map(str, returned))}")
    extra = {str(key): _plain(value) for key, value in returned.items() if key != "score"}
    return _number_score(returned["score"], extra)


def _number_score(value: object, extra: dict[str, Any]) -> Score:
    if not isinstance(value, SupportsFloat):
        return Score.failed(
            "bad value", f"{type(value).__name__} {value!r:.200} is neither a number nor a dict with 'score'"
        )
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        return Score.failed("bad value", f"{type(value).__name__} {value!r:.200} is not one number: {error}")
    if not math.isfinite(number):
        return Score.failed("bad value", f"the score is {number}")
    return Score(number, extra)


def _plain(value: object) -> Any:
    """Return a value as None, bool, int, float, str, list or dict, which every process can read; the rest as text."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    try:
        return float(value)  # pyright: ignore[reportArgumentType] - numpy and torch scalars; what has no float is text
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return str(value)
