"""When a step has too many episodes that failed outside the model."""

from collections.abc import Callable

import pytest
import torch

from vrl.controller.roles import Generated
from vrl.controller.trainer import check_failures
from vrl.protocol.dataproto import Meta
from vrl.protocol.errors import RewardError
from vrl.protocol.rows import batch_of
from vrl.protocol.trajectory import Trajectory

Make = Callable[..., Trajectory]


def test_the_run_stops_above_the_share_of_failed_episodes(trajectory: Make):
    rows = batch_of([trajectory(), *(trajectory(failure=f"sandbox: no {n}") for n in range(3))], None, Meta())
    good = torch.tensor([True, False, False, False])
    generated = Generated(rows.rows(good), rows.rows(~good), 0, {})
    check_failures(generated, 7, 0.75)
    check_failures(Generated(rows[:1], rows[:0], 0, {}), 7, 0.0)
    for ratio in (0.74, 0.0):
        with pytest.raises(RewardError, match=r"step 7: 3 of 4 episodes failed outside the model; .*: sandbox: no 0"):
            check_failures(generated, 7, ratio)
