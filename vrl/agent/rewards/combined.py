"""Several rules, weighted and added; each part stands beside the score."""

from collections.abc import Mapping, Sequence
from typing import Any

from vrl.agent.rewards.registry import find_rule, register_reward
from vrl.protocol.errors import ConfigError


@register_reward("combined")
def compute_score(
    *, solution_str: str, ground_truth: Any, extra_info: Any = None, parts: Sequence[Mapping[str, Any]] = (), **_: Any
) -> dict[str, Any]:
    """Return the sum over `parts` of weight times score: that stands under a part's name, its score under `name/score`.

    A part is `{rule, weight, name, kwargs}`: `rule` is a data source that has one; weight 1, the rule as name and no
    keyword arguments by default. Other numbers that a part returns stand under `name/key`. Raises ConfigError when
    there are no parts, two of one name, or a rule is unknown.
    """
    if not parts:
        raise ConfigError("the reward `combined` needs reward_kwargs.parts: [{rule: exact_match, weight: 1.0}, ...]")
    total = 0.0
    result: dict[str, Any] = {}
    for part in parts:
        rule = str(part["rule"])
        name = str(part.get("name", rule))
        if name in result:
            raise ConfigError(f"the reward `combined` has two parts {name!r}; give one another name")
        returned = find_rule(rule)(
            data_source=rule,
            solution_str=solution_str,
            ground_truth=ground_truth,
            extra_info=extra_info,
            **(part.get("kwargs") or {}),
        )
        beside = dict(returned) if isinstance(returned, Mapping) else {"score": returned}
        result[name] = float(part.get("weight", 1.0)) * float(beside["score"])
        result |= {f"{name}/{key}": value for key, value in beside.items()}
        total += result[name]
    return {"score": total, **result}
