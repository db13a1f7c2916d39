"""A run gives up after so many steps in a row that taught it nothing, and says which role and which key."""

import pytest

from vrl.controller.patience import Patience
from vrl.protocol.errors import WorkerError


def test_steps_without_a_row_end_a_run_when_too_many_follow_each_other():
    patience = Patience(max_steps_without_samples=3, max_nonfinite_steps=1)
    for rows in (0, 0, 8, 0, 0):
        patience.count(rows)
        patience.check({})
    patience.count(0)
    with pytest.raises(WorkerError, match=r"^3 steps in a row had no row .* \(trainer.max_steps_without_samples "):
        patience.check({})


@pytest.mark.parametrize(
    ("role", "rate"), [("actor", "actor_rollout_ref.actor.optim.lr"), ("critic", "critic.optim.lr")]
)
def test_gradients_that_are_not_finite_end_a_run_whosever_they_are(role: str, rate: str):
    patience = Patience(max_steps_without_samples=1, max_nonfinite_steps=4)
    patience.check({"actor/skipped_in_a_row": 3.0, "critic/skipped_in_a_row": 3.0})
    with pytest.raises(WorkerError) as error:
        patience.check({"actor/skipped_in_a_row": 0.0, "critic/skipped_in_a_row": 0.0, f"{role}/skipped_in_a_row": 4.0})
    assert str(error.value).startswith(f"4 optimizer steps of the {role} in a row")
    assert f"lower {rate} " in str(error.value)
    assert "trainer.max_nonfinite_steps" in str(error.value)
