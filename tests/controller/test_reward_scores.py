"""How the scores of reward function and reward model become one."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from vrl.controller.data_metrics import data_metrics
from vrl.controller.reward_model import check_text_only, with_scores
from vrl.protocol.columns import RM_CUT_TOKENS, RM_SCORES, SCORE_EXTRA, TOKEN_LEVEL_SCORES
from vrl.protocol.config.builder import build
from vrl.protocol.dataproto import DataProto, Meta
from vrl.protocol.errors import ConfigError, RewardError
from vrl.protocol.rows import batch_of
from vrl.protocol.trajectory import Trajectory


def found(*scores: float) -> DataProto:
    cut = torch.arange(len(scores), dtype=torch.int64)
    return DataProto({RM_SCORES: torch.tensor(scores), RM_CUT_TOKENS: cut})


def test_scores_are_a_weighted_sum_on_the_last_sampled_token(trajectory: Callable[..., Trajectory]) -> None:
    episodes = [
        trajectory(prompt=2, turns=(2,), score=1.0, score_extra={"acc": True}),
        trajectory(prompt=1, turns=(1, 2), score=0.5),
        trajectory(prompt=3, turns=(), score=9.0),  # nothing was sampled: no score stands anywhere
    ]
    scored = with_scores(batch_of(episodes, None, Meta()), found(2.0, -4.0, 7.0), weight=0.25, rule_weight=2.0)
    rows = [row.tolist() for row in scored.ragged(TOKEN_LEVEL_SCORES).to_rows()]
    assert rows == [[0, 0, 0, 2.5], [0, 0, 0, 0, 0.0], [0, 0, 0]]
    assert scored.objects[SCORE_EXTRA][0] == {"acc": True, "rule_score": 1.0, "rm_score": 2.0}
    assert scored.objects[SCORE_EXTRA][2] == {"rule_score": 0.0, "rm_score": 7.0}
    metrics = data_metrics(scored)
    assert metrics["critic/score/mean"] == pytest.approx(2.5 / 3)
    assert metrics["reward_model/score/mean"] == pytest.approx(5.0 / 3)
    assert (metrics["reward_model/score/min"], metrics["reward_model/score/max"]) == (-4.0, 7.0)
    assert metrics["reward_model/rule_score/mean"] == pytest.approx(0.5)
    assert metrics["reward_model/truncated_rows"] == 2


def test_a_score_that_is_no_number_is_named(trajectory: Callable[..., Trajectory]) -> None:
    rows = batch_of([trajectory(uid="a"), trajectory(uid="b")], None, Meta())
    with pytest.raises(RewardError, match="gave 1 of 2 rows no finite score, the first is a sample of b"):
        with_scores(rows, found(1.0, float("nan")), weight=1.0, rule_weight=1.0)


def test_rows_with_images_are_refused() -> None:
    config = build({"reward_model": {"enable": True, "model": {"path": "rm"}}})
    check_text_only(config, 0)
    with pytest.raises(ConfigError, match=r"path=rm reads text, but there are rows with up to 2 images"):
        check_text_only(replace(config), 2)
