"""A user's own reward function, loaded by file and name inside a reward process (`custom_reward_function.*`)."""

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from vrl.agent.rewards.registry import find_rule
from vrl.agent.rewards.settings import check_rule_settings
from vrl.agent.rewards.types import RewardFunction, RewardSpec
from vrl.protocol.errors import ConfigError

_MODULE_NAME = "vrl_user_reward"
_BUILT_IN = "vrl:"  # before the name of a rule of the registry, which then scores every row


def load_user_function(spec: RewardSpec) -> RewardFunction:
    """Import the file of `spec` and return its function; `vrl:<data source>` instead of a file is a built-in rule.

    Modules beside the file can be imported by it. Raises ConfigError with one message when the file or the name is
    missing, the import fails, or the function cannot be called with verl's arguments and `reward_kwargs`.
    """
    if (spec.function_path or "").startswith(_BUILT_IN):
        rule = (spec.function_path or "").removeprefix(_BUILT_IN)
        check_rule_settings(rule, spec.function_kwargs, "custom_reward_function.reward_kwargs")
        function = find_rule(rule)
        _check_signature(function, spec)
        return function
    path = Path(spec.function_path or "").expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"custom_reward_function.path={spec.function_path}: there is no file {path}")
    function = vars(_import_file(path)).get(spec.function_name)
    if not callable(function):
        raise ConfigError(_missing_name(path, spec.function_name))
    _check_signature(function, spec)
    return function


def _import_file(path: Path) -> ModuleType:
    module_spec = importlib.util.spec_from_file_location(_MODULE_NAME, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"custom_reward_function.path={path}: not a Python file (its name must end in .py).")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[_MODULE_NAME] = module  # dataclasses and pickle look modules up there
    sys.path.append(str(path.parent))
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise ConfigError(
            f"custom_reward_function.path={path}: importing it failed with {type(error).__name__}: {error}"
        ) from error
    return module


def _missing_name(path: Path, name: str) -> str:
    own = [key for key, value in vars(sys.modules[_MODULE_NAME]).items() if inspect.isfunction(value)]
    return (
        f"custom_reward_function.name={name}: {path} has no such function; "
        f"it has {', '.join(sorted(own)) or 'no function at all'}."
    )


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
