"""Rules of micro-batches and attention, role by role."""

from typing import Any

import pytest

from tests.protocol.config.test_rules import A, M, R, config_with, faults
from vrl.protocol.config.rules import check

EAGER = {"attn_implementation": "eager"}
CRITIC = {"algorithm.adv_estimator": "gae", "critic.ulysses_sequence_parallel_size": 2}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {f"{A}.ulysses_sequence_parallel_size": 2, f"{M}.override_config": EAGER},
            [f"{M}.override_config.attn_implementation=eager", f"set {A}.ulysses_sequence_parallel_size=1"],
        ),
        (
            {**CRITIC, "critic.model.override_config": {"attn_implementation": "sdpa"}},
            ["critic.model.override_config.attn_implementation=sdpa", "set critic.ulysses_sequence_parallel_size=1"],
        ),
    ],
    ids=["actor and reference", "critic"],
)
def test_parts_of_a_sequence_need_an_attention_that_knows_of_them(changes: dict[str, Any], parts: list[str]):
    (message,) = faults(changes).splitlines()
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    "changes",
    [
        {f"{M}.override_config": EAGER},
        {**CRITIC, f"{M}.override_config": EAGER},  # of the other model
        {f"{A}.ulysses_sequence_parallel_size": 2, f"{M}.override_config": {"attn_implementation": "varlen"}},
        {"critic.ulysses_sequence_parallel_size": 2, "critic.model.override_config": EAGER},  # there is no critic
    ],
    ids=str,
)
def test_other_attentions_are_free(changes: dict[str, Any]):
    assert check(config_with(changes)) == ()


@pytest.mark.parametrize(
    "key",
    [
        f"{R}.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "critic.ppo_micro_batch_size_per_gpu",
    ],
)
def test_rows_that_no_micro_batch_counts_are_said(key: str):
    (warning,) = check(config_with({key: 4}))
    assert f"{key}=4 has no effect" in warning
    assert "use_dynamic_bsz=True" in warning
    by_rows = {f"{A}.use_dynamic_bsz": False, f"{A}.ppo_micro_batch_size_per_gpu": 2}
    assert check(config_with({key: 4, **by_rows})) == ()
