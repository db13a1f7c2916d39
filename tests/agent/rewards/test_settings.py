"""Keyword arguments of built-in rules are looked at before a run starts."""

import pytest

from vrl.agent.rewards.scoring import make_scorer
from vrl.agent.rewards.types import RewardSpec
from vrl.protocol.errors import ConfigError

SOURCES = ("arc", "openai/gsm8k")


def test_a_setting_that_one_of_the_rules_knows_is_fine():
    make_scorer(RewardSpec(data_sources=SOURCES, function_kwargs={"method": "flexible", "partial": True}))


@pytest.mark.parametrize(
    ("sources", "name", "said"),
    [
        (SOURCES, "metod", "the reward arc, openai/gsm8k has no setting 'metod'. Did you mean method"),
        (("tiny/visual",), "format_score", "the reward tiny/visual has no setting 'format_score'. It has: none"),
        (("llm_judge",), "model", "the reward llm_judge needs base_url"),
    ],
)
def test_a_setting_that_none_knows_is_refused(sources: tuple[str, ...], name: str, said: str):
    with pytest.raises(ConfigError) as error:
        make_scorer(RewardSpec(data_sources=sources, function_kwargs={name: "flexible"}))
    assert str(error.value).startswith(f"custom_reward_function.reward_kwargs: {said}")
