"""A user's own reward function, loaded by file and name inside a reward process (`custom_reward_function.*`)."""

import inspect
from pathlib import Path

from vrl.agent.plugins import import_file
from vrl.agent.rewards.registry import find_rule
from vrl.agent.rewards.settings import check_rule_settings
from vrl.agent.rewards.types import RewardFunction, RewardSpec
from vrl.protocol.errors import ConfigError

_BUILT_IN = "vrl:"  # before the name of a rule of the registry, which then scores every row


def load_user_function(spec: RewardSpec) -> RewardFunction:
    """Import the file of `spec` and return its function; `vrl:<data source>` instead of a file is a built-in rule.

    Modules beside the file can be imported by it. Raises ConfigError with one message when the file or the name is
    missing, the import fails, or the function cannot be called with verl's arguments and `reward_kwargs`.
    """
    rule = built_in_rule(spec)
    if rule is not None:
        check_rule_settings(rule, spec.function_kwargs, "custom_reward_function.reward_kwargs")
        function = find_rule(rule)
        _check_signature(function, spec)
        return function
    module = import_file(Path(spec.function_path or ""), f"custom_reward_function.path={spec.function_path}")
    function = vars(module).get(spec.function_name)
    if not callable(function):
        own = sorted(name for name, value in vars(module).items() if inspect.isfunction(value))
        raise ConfigError(
            f"custom_reward_function.name={spec.function_name}: {module.__file__} has no such function; "
            f"it has {', '.join(own) or 'no function at all'}"
        )
    _check_signature(function, spec)
    return function


def built_in_rule(spec: RewardSpec) -> str | None:
    """Return the rule that `vrl:<data source>` names for every row; None where there is none."""
    path = spec.function_path or ""
    return path.removeprefix(_BUILT_IN) if path.startswith(_BUILT_IN) else None


def _check_signature(function: RewardFunction, spec: RewardSpec) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C: it shows when it is called
        return
    try:
        signature.bind(data_source="", solution_str="", ground_truth="", extra_info=None, **spec.function_kwargs)
    except TypeError as error:
        raise ConfigError(
            f"custom_reward_function.name={spec.function_name} is called with ({_call_form(spec)}), "
            f"but has the signature {signature}: {error}"
        ) from error


def _call_form(spec: RewardSpec) -> str:
    return ", ".join(["data_source", "solution_str", "ground_truth", "extra_info", *spec.function_kwargs])
