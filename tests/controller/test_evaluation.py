"""An evaluation without a single score is a failure, not an empty result."""

from collections.abc import Callable

import pytest
import torch

from vrl.controller.evaluation import check_scored
from vrl.controller.roles import Generated
from vrl.protocol.dataproto import Meta
from vrl.protocol.errors import RewardError
from vrl.protocol.rows import batch_of
from vrl.protocol.trajectory import Trajectory

Make = Callable[..., Trajectory]


def test_all_episodes_failed(trajectory: Make):
    rows = batch_of([trajectory("a"), *(trajectory("b", failure="reward raised: no eyes") for _ in "12")], None, Meta())
    good = torch.tensor([True, False, False])
    check_scored(Generated(rows.rows(good), rows.rows(~good), 0, {}))
    check_scored(Generated(rows[:0], rows[:0], 0, {}))
    with pytest.raises(RewardError, match=r"all 2 episodes of the evaluation failed outside the model.*: no eyes"):
        check_scored(Generated(rows[:0], rows.rows(~good), 0, {}))
