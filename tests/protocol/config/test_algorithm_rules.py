"""Rules of estimators, losses and rewards: what one of them would leave out without a word is refused or said."""

from typing import Any

import pytest

from tests.protocol.config.test_rules import REWARD_MODEL, A, R, config_with, faults
from vrl.protocol.config.rules import check

GDPO = {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["acc"]}
GDPO_WITH_MODEL = {**GDPO, **REWARD_MODEL, "algorithm.gdpo_reward_keys": ["acc", "rm_score"]}
OVERLONG = {"reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": 9}
WARMUP = {"algorithm.adv_estimator": "gae", "trainer.critic_warmup": 20}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({**GDPO, **OVERLONG}, ["adv_estimator=gdpo", "overlong_buffer.enable=True has no effect", "set it to False"]),
        ({**GDPO, "reward_model.reward_clip": 2.0}, ["reward_clip=2.0 has no effect", "set it to null"]),
        ({**GDPO, **REWARD_MODEL}, ["reward_model.enable=True has no effect", "add rm_score to algorithm.gdpo_reward"]),
        (
            {**GDPO_WITH_MODEL, "reward_model.weight": 0.5},
            ["reward_model.weight=0.5 and rule_weight=1.0 have no effect", "give algorithm.gdpo_reward_weights"],
        ),
        ({**GDPO_WITH_MODEL, "reward_model.rule_weight": 2.0}, ["rule_weight=2.0 have no effect"]),
        ({"algorithm.adv_estimator": "grpo_passk", f"{R}.n": 1}, ["adv_estimator=grpo_passk", "rollout.n=1", "n=8"]),
        (
            {**WARMUP, "trainer.total_training_steps": 20},
            ["critic_warmup=20", "total_training_steps=20", "set critic_warmup=2,"],
        ),
        ({**WARMUP, "trainer.total_training_steps": 5}, ["critic_warmup=20", "total_training_steps=5"]),
    ],
    ids=str,
)
def test_what_would_have_no_effect_is_refused(changes: dict[str, Any], parts: list[str]):
    message = faults(changes)
    assert [part for part in parts if part not in message] == []
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        GDPO_WITH_MODEL,
        {**GDPO_WITH_MODEL, "reward_model.rule_weight": 0.0},
        {**WARMUP, "trainer.total_training_steps": 21},
        {**WARMUP, "trainer.total_training_steps": 20, "trainer.val_only": True},
        {"algorithm.adv_estimator": "remax", "reward_model.reward_clip": 2.0},
        {"algorithm.adv_estimator": "remax", **OVERLONG},
        {f"{A}.policy_loss.loss_mode": "gspo", f"{A}.loss_agg_mode": "seq-mean-token-mean"},
    ],
    ids=str,
)
def test_what_fits_together_passes_without_a_word(changes: dict[str, Any]):
    assert check(config_with(changes)) == ()


@pytest.mark.parametrize("loss", ["gspo", "sapo", "geo_mean", "tba"])
def test_a_loss_that_brings_its_aggregation_says_so(loss: str):
    (warning,) = check(config_with({f"{A}.policy_loss.loss_mode": loss, f"{A}.loss_agg_mode": "token-sum"}))
    assert "loss_agg_mode=token-sum holds for entropy and KL only" in warning
    assert f"loss_mode={loss} is defined with seq-mean-token-mean; set loss_agg_mode=seq-mean-token-mean" in warning


@pytest.mark.parametrize(
    ("do_sample", "temperature", "n", "said"),
    [(True, 0.0, 4, True), (False, 1.0, 4, True), (True, 0.6, 4, False), (True, 0.0, 1, False)],
)
def test_equal_greedy_answers_are_said(do_sample: bool, temperature: float, n: int, said: bool):
    values = {"do_sample": do_sample, "temperature": temperature, "n": n}
    warnings = check(config_with({f"{R}.val_kwargs.{name}": value for name, value in values.items()}))
    assert len(warnings) == said
    assert all("val_kwargs.n=4" in warning and "n=1" in warning for warning in warnings)
