"""Keyword arguments of the built-in rules, looked at before a run starts: a rule ignores those it does not know."""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Final

from vrl.agent.rewards.judge import JudgeSettings
from vrl.agent.rewards.registry import BUILT_IN_MODULES, find_rule
from vrl.protocol.errors import ConfigError

_CALL: Final = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})


def check_rule_settings(rule: str, settings: Mapping[str, Any], place: str) -> None:
    """Raise ConfigError when a rule is unknown, or has no such settings, or lacks one; `place` is where they stand."""
    check_rules_settings([rule], settings, place)


def check_rules_settings(rules: Sequence[str], settings: Mapping[str, Any], place: str) -> None:
    """Raise ConfigError as `check_rule_settings` does, for rules that share settings: one of them has to know each."""
    known = set[str]().union(*map(_known, rules))
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else f" It has: {', '.join(sorted(known)) or 'none'}."
            raise ConfigError(f"{place}: the reward {', '.join(rules)} has no setting {name!r}.{hint}")
    for rule in rules:
        _check_needed(rule, settings, place)


def runs_code(rule: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a rule runs a model's code, itself or in a part."""
    if rule == "combined":
        parts = settings.get("parts") or ()
        return any(runs_code(str(part.get("rule")), part.get("kwargs") or {}) for part in parts)
    return rule in BUILT_IN_MODULES["vrl.agent.rewards.code_tests"]


def _known(rule: str) -> set[str]:
    parameters = inspect.signature(find_rule(rule)).parameters.values()
    known = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY} - _CALL
    return known | {field.name for field in fields(JudgeSettings)} if rule == "llm_judge" else known


def _check_needed(rule: str, settings: Mapping[str, Any], place: str) -> None:
    needed = {field.name for field in fields(JudgeSettings) if field.default is MISSING}
    if rule != "llm_judge":
        needed = set[str]()
    if missing := sorted(needed.difference(settings)):
        raise ConfigError(f"{place}: the reward {rule} needs {', '.join(missing)}")
    if rule == "combined":
        _check_parts(settings, place)


def _check_parts(settings: Mapping[str, Any], place: str) -> None:
    parts = settings.get("parts") or ()
    if not parts:
        raise ConfigError(f"{place}: the reward combined needs parts: [{{rule: exact_match, weight: 1.0}}, ...]")
    for number, part in enumerate(parts):
        if "rule" not in part:
            raise ConfigError(f"{place}.parts[{number}] names no rule")
        check_rule_settings(str(part["rule"]), part.get("kwargs") or {}, f"{place}.parts[{number}].kwargs")
