"""Rules by data source: rule modules register their functions here, `scoring` looks them up by `data_source`."""

import importlib
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TypeVar

from vrl.agent.rewards.types import RewardFunction
from vrl.protocol.errors import ConfigError

# Who registers what. Rule modules are imported on first use: `math` needs sympy, which costs 1.5 s and 50 MB a process.
BUILT_IN_MODULES = {
    "vrl.agent.rewards.tiny": ("tiny/visual", "tiny/arithmetic", "tiny/code", "tiny/zoom"),
    "vrl.agent.rewards.arithmetic": ("reasoning_gym/*",),
    "vrl.agent.rewards.gsm8k": ("openai/gsm8k",),
    "vrl.agent.rewards.math": ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
    "vrl.agent.rewards.geo3k": ("hiyouga/geometry3k",),
    "vrl.agent.rewards.text_match": ("exact_match", "token_f1", "searchR1_*"),
    "vrl.agent.rewards.response_format": ("format",),
    "vrl.agent.rewards.arc": ("arc", "arc/*"),
    "vrl.agent.rewards.code_tests": ("code_tests", "codecontests", "apps", "codeforces", "taco"),
    "vrl.agent.rewards.judge": ("llm_judge",),
    "vrl.agent.rewards.combined": ("combined",),
}

_rules: dict[str, RewardFunction] = {}
_F = TypeVar("_F", bound=RewardFunction)


def register_reward(*data_sources: str) -> Callable[[_F], _F]:
    """Register the decorated function as the rule of these data sources; `*` in a name stands for any text.

    Raises ValueError when a name is taken.
    """

    def register(function: _F) -> _F:
        for data_source in data_sources:
            if data_source in _rules:
                raise ValueError(f"data source {data_source!r} already has a rule")
            _rules[data_source] = function
        return function

    return register


def known_data_sources() -> list[str]:
    """Return every data source that has a rule, sorted; patterns stand as they were registered."""
    return sorted(set(_rules).union(*BUILT_IN_MODULES.values()))


def find_rule(data_source: str) -> RewardFunction:
    """Return the rule of a data source, an exact name before a pattern.

    Raises ConfigError that lists the known data sources when there is none.
    """
    for module, names in BUILT_IN_MODULES.items():
        if any(fnmatchcase(data_source, name) for name in names):
            importlib.import_module(module)
    if data_source in _rules:
        return _rules[data_source]
    for pattern, rule in _rules.items():
        if fnmatchcase(data_source, pattern):
            return rule
    raise ConfigError(
        f"no reward rule for data source {data_source!r}. Known: {', '.join(known_data_sources())}. "
        "For another one set custom_reward_function.path to a Python file with a function compute_score."
    )
