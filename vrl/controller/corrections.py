"""What the updates learn from, on the driver: rows, loss mask and weights of their own, and what a loss wants beside.

The trainer applies `Corrections` once a step, after the advantages, to the rows it hands to the updates. Its own rows
keep `loss_mask` as the rollout wrote it, so that rewards, advantages and the metrics of the rollout see every sampled
token; only what is divided, averaged and learnt in the updates follows the mask that is left. (verl takes rejected
tokens out before advantages, which loses the reward of a row whose last token is rejected.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch

from vrl.algorithms import segments
from vrl.algorithms.losses.registry import LossInputs, LossParams, PolicyLoss, get_policy_loss
from vrl.algorithms.reward_shaping import mask_rows
from vrl.algorithms.rollout_correction import RolloutCorrectionParams, rollout_correction
from vrl.protocol.columns import (
    ADVANTAGES,
    GROUP,
    LOSS_MASK,
    MINI_BATCH,
    OLD_LOG_PROBS,
    ROLLOUT_IS_WEIGHTS,
    ROLLOUT_LOG_PROBS,
    SELECTED,
    STOP_REASON,
    TOKEN_LEVEL_REWARDS,
    UID,
)
from vrl.protocol.config.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from vrl.protocol.config.learner import ActorConfig
from vrl.protocol.dataproto import DataProto
from vrl.protocol.errors import ConfigError
from vrl.protocol.ragged import Ragged
from vrl.protocol.rows import group_numbers
from vrl.protocol.trajectory import StopReason
from vrl.workers.losses import loss_params

Correction = Callable[[DataProto], tuple[DataProto, dict[str, float]]]  # rows -> rows to learn from, metrics
LossColumns = Callable[[DataProto, int], DataProto]  # rows with mini-batches, seed -> with what the loss wants beside
_CUT_AT_A_TOKEN_LIMIT = (StopReason.LENGTH, StopReason.CONTEXT_FULL)


@final
@dataclass(frozen=True, slots=True)
class MaskTruncated:
    """DAPO's overlong filtering: rows that were cut at a token limit train nothing. They stay in their group."""

    def __call__(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Return the rows with no token of the cut ones in the loss mask, and the share of such rows."""
        cut = torch.tensor([reason in _CUT_AT_A_TOKEN_LIMIT for reason in batch.objects[STOP_REASON]])
        mask = batch.ragged(LOSS_MASK)
        kept = Ragged(mask_rows(mask.values, cut, mask.offsets), mask.offsets)
        return batch.with_columns(**{LOSS_MASK: kept}), {"training/masked_truncated": float(cut.double().mean())}


@final
@dataclass(frozen=True, slots=True)
class RolloutCorrection:
    """Importance weights for the gap between engine and learner, and rejection of what is too far off."""

    params: RolloutCorrectionParams

    def __call__(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Return the rows with weights (where they are on) and without the rejected tokens, and `rollout_corr/*`."""
        mask = batch.ragged(LOSS_MASK)
        result = rollout_correction(
            batch.ragged(OLD_LOG_PROBS).values,
            batch.ragged(ROLLOUT_LOG_PROBS).values,
            mask.values,
            mask.offsets,
            self.params,
        )
        columns = {LOSS_MASK: Ragged(result.mask, mask.offsets)}
        if result.weights is not None:
            columns[ROLLOUT_IS_WEIGHTS] = Ragged(result.weights, mask.offsets)
        return batch.with_columns(**columns), {f"rollout_corr/{name}": x for name, x in result.metrics.items()}


@final
@dataclass(frozen=True, slots=True)
class PreferencePairs:
    """What learns from preferences learns from pairs with one: a row alone (the other failed) and equal rows have none.

    SPIN's code trains equal rows as well, the first as the chosen one: that is noise.
    """

    def __call__(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Return the rows of groups of two whose rewards differ, and how many pairs these are and how many not."""
        rewards = batch.ragged(TOKEN_LEVEL_REWARDS)
        scores = segments.row_sum(rewards.values.double(), rewards.offsets).tolist()
        found: dict[str, list[float]] = {}
        for uid, score in zip(batch.objects[UID], scores, strict=True):
            found.setdefault(uid, []).append(score)
        pairs = {uid for uid, both in found.items() if len(both) == 2 and both[0] != both[1]}
        kept = torch.tensor([uid in pairs for uid in batch.objects[UID]], dtype=torch.bool)
        metrics = {"training/pairs": len(pairs), "training/pairs_without_preference": len(found) - len(pairs)}
        return batch.rows(kept), {name: float(count) for name, count in metrics.items()}


@final
@dataclass(frozen=True, slots=True)
class Corrections:
    """All that is on, one after the other. With nothing on, the rows come back as they are."""

    parts: Sequence[Correction] = ()

    def __call__(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Return the rows to learn from, and metrics."""
        metrics: dict[str, float] = {}
        for part in self.parts:
            batch, new = part(batch)
            metrics |= new
        return batch, metrics


@final
@dataclass(frozen=True, slots=True)
class SelectedTokens:
    """The tokens that the policy loss (clip_cov, kl_cov) treats apart, chosen once from each whole mini-batch.

    By old log-probs and the mini-batches of the first epoch: exact in the first update of a step, a deviation in later
    ones, whose weights have moved.
    """

    loss: PolicyLoss
    params: LossParams

    def __call__(self, batch: DataProto, seed: int) -> DataProto:
        """Return the rows with column `selected`; equal seeds choose equally, however rows are cut over ranks."""
        mask = batch.ragged(LOSS_MASK)
        selected = torch.zeros_like(mask.values)
        generator = torch.Generator().manual_seed(seed)
        needed = batch.select([LOSS_MASK, OLD_LOG_PROBS, ADVANTAGES])
        number = batch.dense(MINI_BATCH)[:, 0]
        for k in range(int(number.max()) + 1):
            members = number == k
            tokens = torch.repeat_interleave(members, mask.lengths)
            selected[tokens] = self.loss.select(_inputs(needed.rows(members)), self.params, generator)
        return batch.with_columns(**{SELECTED: Ragged(selected, mask.offsets)})


def _inputs(rows: DataProto) -> LossInputs:
    mask, old = rows.ragged(LOSS_MASK), rows.ragged(OLD_LOG_PROBS).values
    return LossInputs(
        log_probs=old,
        old_log_probs=old,
        advantages=rows.ragged(ADVANTAGES).values,
        mask=mask.values,
        offsets=mask.offsets,
    )


def whole_groups(batch: DataProto, seed: int) -> DataProto:  # noqa: ARG001  (part of the interface)
    """Return the rows with column `group`, which keeps a group on one rank and in one micro-batch."""
    return batch.with_columns(**{GROUP: group_numbers(batch)})


def no_columns(batch: DataProto, seed: int) -> DataProto:  # noqa: ARG001  (part of the interface)
    """Return the rows as they are: for losses that treat all tokens alike, and for the critic."""
    return batch


def loss_columns(actor: ActorConfig) -> LossColumns:
    """Return what the policy loss wants beside: tokens chosen from each mini-batch, or groups."""
    loss = get_policy_loss(actor.policy_loss.loss_mode)
    if loss.needs_whole_groups:
        return whole_groups
    return SelectedTokens(loss, loss_params(actor)) if loss.needs_selection else no_columns


def corrections(config: AlgorithmConfig, loss: PolicyLoss | None = None) -> Corrections:
    """Return what changes the rows of the updates, in order; nothing unless the settings or the loss ask for it."""
    parts = list[Correction]()
    if loss is not None and loss.compares_pairs:
        parts.append(PreferencePairs())
    if config.mask_truncated_completions:
        parts.append(MaskTruncated())
    if config.rollout_correction.enabled:
        parts.append(RolloutCorrection(correction_params(config.rollout_correction)))
    return Corrections(tuple(parts))


def correction_params(config: RolloutCorrectionConfig) -> RolloutCorrectionParams:
    """Return the formula's settings. Raises ConfigError for statistics and thresholds that it does not have."""
    try:
        return RolloutCorrectionParams(
            rollout_is=config.rollout_is,
            rollout_is_threshold=config.rollout_is_threshold,
            rollout_is_batch_normalize=config.rollout_is_batch_normalize,
            rollout_rs=config.rollout_rs,
            rollout_rs_threshold=config.rollout_rs_threshold,
        )
    except ValueError as error:
        raise ConfigError(f"algorithm.rollout_correction: {error}") from error
