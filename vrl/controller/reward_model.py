"""The reward model as the training loop sees it: its scores are weighed and added to those of the reward functions."""

from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from vrl.algorithms.segments import place_on_last_sampled
from vrl.controller.data_metrics import row_sums
from vrl.controller.roles import Generated, stage_seconds
from vrl.controller.worker_group import WorkerGroup
from vrl.protocol.columns import (
    INPUT_IDS,
    LOSS_MASK,
    MESSAGES,
    RESPONSE_TEXT,
    RM_CUT_TOKENS,
    RM_SCORES,
    RULE_SCORES,
    SCORE_EXTRA,
    TOKEN_LEVEL_SCORES,
    UID,
)
from vrl.protocol.config.schema import Config
from vrl.protocol.dataproto import DataProto, object_column
from vrl.protocol.errors import ConfigError, RewardError
from vrl.protocol.ragged import Ragged

_READ = (INPUT_IDS, MESSAGES, RESPONSE_TEXT)


@final
class RewardModel:
    """A classifier that scores finished rows, beside the reward functions."""

    def __init__(self, group: WorkerGroup, weight: float, rule_weight: float) -> None:
        self._group = group
        self._weight = weight
        self._rule_weight = rule_weight

    def score(self, generated: Generated) -> Generated:
        """Score the rows; see `with_scores`. Failed ones are left alone.

        Raises RewardError for a score that is not finite.
        """
        rows = generated.rows
        if not len(rows):
            return generated
        found = self._group.call("score", rows.select(_READ))
        scored = with_scores(rows, found, self._weight, self._rule_weight)
        return replace(generated, rows=scored, timing=generated.timing | stage_seconds(found))


def with_scores(rows: DataProto, found: DataProto, weight: float, rule_weight: float) -> DataProto:
    """Return the rows with `rule_weight * rule + weight * model` as their scores.

    The model's part stands on the last sampled token; a row without one gets none. Both parts stay beside it, as
    columns and as `rule_score` and `rm_score` in `score_extra`. `found` has the columns of `reward_model.score`.
    """
    scores, mask = found.dense(RM_SCORES), rows.ragged(LOSS_MASK)
    _check_finite(rows, scores)
    rules = rows.ragged(TOKEN_LEVEL_SCORES)
    rule_scores = row_sums(rows, TOKEN_LEVEL_SCORES).float()
    total = rule_weight * rules.values + place_on_last_sampled(weight * scores, mask.values, mask.offsets)
    parts = zip(rows.objects[SCORE_EXTRA], rule_scores.tolist(), scores.tolist(), strict=True)
    return rows.with_columns(
        **{
            TOKEN_LEVEL_SCORES: Ragged(total, rules.offsets),
            RULE_SCORES: rule_scores,
            RM_SCORES: scores,
            RM_CUT_TOKENS: found.dense(RM_CUT_TOKENS),
            SCORE_EXTRA: object_column({**extra, "rule_score": rule, "rm_score": rm} for extra, rule, rm in parts),
        }
    )


def check_text_only(config: Config, most_images: int) -> None:
    """Refuse rows with images, which a reward model would not see."""
    if most_images:
        raise ConfigError(
            f"reward_model.model.path={config.reward_model.model.path} reads text, but there are rows with up to "
            f"{most_images} images: take them out of data.train_files and data.val_files, or set "
            "reward_model.enable=False"
        )


def _check_finite(rows: DataProto, scores: Tensor) -> None:
    wrong = (~torch.isfinite(scores)).nonzero()[:, 0].tolist()
    if wrong:
        raise RewardError(
            f"the reward model gave {len(wrong)} of {len(scores)} rows no finite score, the first is a sample of "
            f"{rows.objects[UID][wrong[0]]}; set reward_model.fsdp_config.dtype=float32, or look at the model's weights"
        )
