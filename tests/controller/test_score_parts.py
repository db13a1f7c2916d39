"""Parts of the score: from the dicts of reward functions to numbers, and to gdpo's advantages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vrl.algorithms.advantages.registry import AdvantageParams, get_advantage
from vrl.controller.credit import Advantage
from vrl.controller.score_parts import score_parts
from vrl.protocol.columns import ADVANTAGES, LOSS_MASK, TOKEN_LEVEL_REWARDS, TOKEN_LEVEL_SCORES
from vrl.protocol.dataproto import DataProto, Meta
from vrl.protocol.errors import RewardError
from vrl.protocol.rows import batch_of
from vrl.protocol.trajectory import Trajectory

Make = Callable[..., Trajectory]


def batch_with(make: Make, *extras: dict[str, Any]) -> DataProto:
    """Rows of two samples a prompt, each with one sampled token and the parts given."""
    rows = [make(f"u{i // 2}", turns=(1,), sample_index=i % 2, score_extra=extra) for i, extra in enumerate(extras)]
    batch = batch_of(rows, None, Meta())
    return batch.with_columns(**{TOKEN_LEVEL_REWARDS: batch.ragged(TOKEN_LEVEL_SCORES)})


def test_parts_are_read_in_the_order_of_the_keys(trajectory: Make):
    batch = batch_with(trajectory, {"format": 1, "accuracy": True, "note": "x"}, {"accuracy": False, "format": 0.5})
    assert score_parts(batch, ["accuracy", "format"]).tolist() == [[1.0, 1.0], [0.0, 0.5]]
    assert score_parts(batch[:0], ["accuracy", "format"]).shape == (0, 2)


@pytest.mark.parametrize(
    ("second", "found"),
    [
        ({"accuracy": 1.0}, "gave no 'format'; beside the score there is accuracy"),
        ({}, "gave no 'accuracy'; beside the score there is nothing"),
        ({"accuracy": 1.0, "format": "good"}, "gave format='good', no finite number"),
        ({"accuracy": 1.0, "format": None}, "gave format=None, no finite number"),
        ({"accuracy": float("nan"), "format": 1.0}, "gave accuracy=nan, no finite number"),
        ({"accuracy": 10**400, "format": 1.0}, "gave accuracy=1000"),
    ],
)
def test_a_missing_part_is_one_error_with_row_and_key(trajectory: Make, second: dict[str, Any], found: str):
    batch = batch_with(trajectory, {"accuracy": 1.0, "format": 0.0}, second)
    with pytest.raises(RewardError) as error:
        score_parts(batch, ["accuracy", "format"])
    message = str(error.value)
    assert found in message
    assert "row 1 of the step (sample 1 of u0, data source tiny/visual)" in message
    assert "algorithm.gdpo_reward_keys" in message


def test_gdpo_compares_each_part_and_weighs_them(trajectory: Make):
    parts = ({"a": 1, "b": 0}, {"a": 0, "b": 4}, {"a": 1, "b": 1}, {"a": 0, "b": 1})
    batch = batch_with(trajectory, *parts)
    params = AdvantageParams(component_weights=(1.0, 2.0))
    out = Advantage(get_advantage("gdpo"), params, ("a", "b"))(batch).ragged(ADVANTAGES).values
    # In each group a part that differs is +-1/sqrt(2); the second group is equal in b.
    half = 0.5**0.5
    total = torch.tensor([half - 2 * half, -half + 2 * half, half, -half])
    wanted = (total - total.mean()) / total.std()
    torch.testing.assert_close(out[batch.ragged(LOSS_MASK).values], wanted, atol=1e-5, rtol=0)


def test_other_estimators_ask_for_no_parts(trajectory: Make):
    batch = batch_with(trajectory, {}, {})
    assert Advantage(get_advantage("grpo"), AdvantageParams())(batch).ragged(ADVANTAGES).values.abs().sum() == 0
