"""The losses of the roles as the learner wants them: counts, one micro-batch, metrics. Formulas: `algorithms/`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from vrl.algorithms import aggregation, segments
from vrl.algorithms.aggregation import Counts
from vrl.algorithms.kl import kl_estimate
from vrl.algorithms.losses.registry import LossInputs, LossParams, PolicyLoss
from vrl.algorithms.losses.value_loss import value_loss
from vrl.models.packing import PackedBatch
from vrl.models.token_log_probs import Extra
from vrl.protocol.columns import (
    ADVANTAGES,
    GROUP,
    INPUT_IDS,
    LOSS_MASK,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    RETURNS,
    ROLLOUT_IS_WEIGHTS,
    ROLLOUT_LOG_PROBS,
    SELECTED,
    TOKEN_LEVEL_REWARDS,
    TURN_IDS,
    VALUES,
)
from vrl.protocol.config.learner import ActorConfig
from vrl.protocol.dataproto import DataProto
from vrl.workers.learner import LossOutput

_ROW = "row/"  # before the name of a sum over rows


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDistribution:
    """What the engine samples from, and the learner computes log-probs of."""

    temperature: float
    banned_ids: tuple[int, ...]
    chunk_tokens: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """Policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy, reference)."""

    loss: PolicyLoss
    params: LossParams
    sampling: SamplingDistribution
    mode: str
    norm_length: float | None
    entropy_coeff: float
    kl_coef: float | None  # None: no KL term
    kl_type: str

    def counts(self, rows: DataProto) -> Counts:
        """Return sampled tokens and sequences of the rows."""
        return _counts(rows)

    def __call__(self, module: nn.Module, packed: PackedBatch, rows: DataProto, totals: Counts) -> LossOutput:
        """Run the policy on one micro-batch; return its share of the loss and the sums behind the metrics."""
        device = packed.input_ids.device
        outputs = module(
            packed,
            temperature=self.sampling.temperature,
            banned_ids=self.sampling.banned_ids,
            want=Extra.ENTROPY,
            chunk_tokens=self.sampling.chunk_tokens,
            positions=_column(rows, LOSS_MASK, device),
        )
        log_probs, entropy = outputs.log_probs, outputs.entropy
        inputs = self._inputs(rows, log_probs)
        result = self.loss(inputs, self.params)
        per_token = result.per_token
        # A loss whose paper fixes the aggregation brings its own; the other terms follow the setting.
        share = partial(
            aggregation.aggregate,
            mask=inputs.mask,
            offsets=inputs.offsets,
            global_counts=totals,
            norm_length=self.norm_length,
            turn_ids=_column(rows, TURN_IDS, device),
        )
        total = share(per_token, mode=self.loss.aggregation or self.mode)
        sums = dict(aggregation.token_sums(dict(result.metrics), inputs.mask))
        sums |= _row_sums(result.row_metrics, inputs)
        sums["pg_loss"] = total.detach()
        sums["entropy"] = (entropy.detach() * inputs.mask).sum()
        if self.entropy_coeff:
            total = total - self.entropy_coeff * share(entropy, mode=self.mode)
        if self.kl_coef is not None:
            kl = kl_estimate(log_probs, _column(rows, REF_LOG_PROBS, device), inputs.mask, self.kl_type)
            kl_term = share(kl, mode=self.mode)
            sums["kl_loss"] = kl_term.detach()
            total = total + self.kl_coef * kl_term
        maxima = {}
        if OLD_LOG_PROBS not in rows:
            difference = probability_difference(
                log_probs.detach(), _column(rows, ROLLOUT_LOG_PROBS, device), inputs.mask
            )
            sums |= {"diff": difference.sum(), "diff_square": difference.double().square().sum()}
            maxima["diff"] = difference.max()
        return LossOutput(total, sums, maxima)

    def _inputs(self, rows: DataProto, log_probs: Tensor) -> LossInputs:
        device = log_probs.device
        offsets = rows.ragged(INPUT_IDS).offsets.to(device)
        on_policy = OLD_LOG_PROBS not in rows  # the only update of a step: its own forward gives the old log-probs
        groups = self.loss.needs_whole_groups
        return LossInputs(
            log_probs=log_probs,
            old_log_probs=log_probs.detach() if on_policy else _column(rows, OLD_LOG_PROBS, device),
            advantages=_column(rows, ADVANTAGES, device),
            mask=_column(rows, LOSS_MASK, device),
            offsets=offsets,
            rollout_is_weights=_column(rows, ROLLOUT_IS_WEIGHTS, device) if ROLLOUT_IS_WEIGHTS in rows else None,
            ref_log_probs=_column(rows, REF_LOG_PROBS, device) if self.loss.needs_ref_log_probs else None,
            selected=_column(rows, SELECTED, device) if SELECTED in rows else None,
            group=rows.dense(GROUP).to(device) if groups else None,
            scores=segments.row_sum(_column(rows, TOKEN_LEVEL_REWARDS, device).double(), offsets) if groups else None,
        )

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float], totals: Counts) -> dict[str, float]:
        """Return means over sampled tokens (over rows where the loss is one of whole rows) as `actor/*`.

        On-policy also `training/rollout_probs_diff_*`.
        """
        tokens = max(totals.tokens, 1)
        whole = ("pg_loss", "kl_loss")  # already shares of a global mean
        out = {f"actor/{name}": sums[name] for name in whole if name in sums}
        for name in sums.keys() - {*whole, "diff", "diff_square"}:
            divisor = max(totals.sequences, 1) if name.startswith(_ROW) else tokens
            out[f"actor/{name.removeprefix(_ROW)}"] = sums[name] / divisor
        if "diff" in sums:
            out |= difference_metrics(sums["diff"], sums["diff_square"], maxima["diff"], tokens)
        return out


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ValueObjective:
    """The critic's clipped value loss."""

    cliprange_value: float
    mode: str
    norm_length: float | None

    def counts(self, rows: DataProto) -> Counts:
        """Return sampled tokens and sequences of the rows."""
        return _counts(rows)

    def __call__(self, module: nn.Module, packed: PackedBatch, rows: DataProto, totals: Counts) -> LossOutput:
        """Run the value model on one micro-batch; return its share of the loss and the sums behind the metrics."""
        device = packed.input_ids.device
        mask = rows.ragged(LOSS_MASK).values.to(device)
        values = module(packed)
        old, returns = _column(rows, VALUES, device), _column(rows, RETURNS, device)
        result = value_loss(values, old, returns, mask, self.cliprange_value)
        offsets = rows.ragged(INPUT_IDS).offsets.to(device)
        turns = _column(rows, TURN_IDS, device)
        loss = aggregation.aggregate(result.per_token, mask, offsets, self.mode, totals, self.norm_length, turns)
        sums = dict(aggregation.token_sums(dict(result.metrics), mask))
        sums |= {"vf_loss": loss.detach(), "vpred_mean": (values.detach() * mask).sum()}
        return LossOutput(loss, sums)

    def metrics(
        self,
        sums: Mapping[str, float],
        maxima: Mapping[str, float],  # noqa: ARG002  (part of the interface)
        totals: Counts,
    ) -> dict[str, float]:
        """Return the loss and means over the sampled tokens as `critic/*`."""
        tokens = max(totals.tokens, 1)
        return {f"critic/{name}": value if name == "vf_loss" else value / tokens for name, value in sums.items()}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedObjective:
    """Cross-entropy on the tokens of `loss_mask`, mean over them: what `vrl sft` and the warm start minimise."""

    sampling: SamplingDistribution

    def counts(self, rows: DataProto) -> Counts:
        """Return sampled tokens and sequences of the rows."""
        return _counts(rows)

    def __call__(self, module: nn.Module, packed: PackedBatch, rows: DataProto, totals: Counts) -> LossOutput:
        """Run the policy on one micro-batch; return its share of the mean cross-entropy."""
        mask = rows.ragged(LOSS_MASK).values.to(packed.input_ids.device)
        outputs = module(packed, chunk_tokens=self.sampling.chunk_tokens, positions=mask)
        loss = -torch.where(mask, outputs.log_probs, 0.0).sum() / max(totals.tokens, 1)
        return LossOutput(loss, {"loss": loss.detach()})

    def metrics(
        self,
        sums: Mapping[str, float],
        maxima: Mapping[str, float],  # noqa: ARG002  (part of the interface)
        totals: Counts,  # noqa: ARG002  (part of the interface)
    ) -> dict[str, float]:
        """Return the mean cross-entropy, in nats a token, as `train/loss`."""
        return {f"train/{name}": value for name, value in sums.items()}


def loss_params(actor: ActorConfig) -> LossParams:
    """Return the settings of the policy losses; actor and driver must choose tokens by the same ones."""
    return LossParams(
        clip_ratio_low=actor.clip_low,
        clip_ratio_high=actor.clip_high,
        clip_ratio_c=actor.clip_ratio_c,
        clip_cov_ratio=actor.policy_loss.clip_cov_ratio,
        clip_cov_lb=actor.policy_loss.clip_cov_lb,
        clip_cov_ub=actor.policy_loss.clip_cov_ub,
        kl_cov_ratio=actor.policy_loss.kl_cov_ratio,
        ppo_kl_coef=actor.policy_loss.ppo_kl_coef,
        tau_pos=actor.tau_pos,
        tau_neg=actor.tau_neg,
        dro_beta=actor.policy_loss.dro_beta,
        tba_beta=actor.policy_loss.tba_beta,
        dpo_beta=actor.policy_loss.dpo_beta,
        dpo_loss_type=actor.policy_loss.dpo_loss_type,
        dpo_label_smoothing=actor.policy_loss.dpo_label_smoothing,
    )


def probability_difference(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return |p_trainer - p_engine| on sampled tokens, 0 elsewhere."""
    return torch.where(mask, (log_probs.exp() - rollout_log_probs.exp()).abs(), 0.0)


def difference_metrics(total: float, squares: float, largest: float, tokens: int) -> dict[str, float]:
    """Return verl's `training/rollout_probs_diff_*` from sums over the sampled tokens."""
    mean = total / tokens
    variance = max(squares / tokens - mean**2, 0.0) * tokens / max(tokens - 1, 1)
    return {
        "training/rollout_probs_diff_mean": mean,
        "training/rollout_probs_diff_max": max(largest, 0.0),
        "training/rollout_probs_diff_std": variance**0.5,
    }


def _counts(rows: DataProto) -> Counts:
    if not len(rows):
        return Counts(0, 0)
    return aggregation.counts(rows.ragged(LOSS_MASK).values, rows.ragged(INPUT_IDS).offsets)


def _row_sums(metrics: Mapping[str, Tensor], inputs: LossInputs) -> dict[str, Tensor]:
    """Return sums over the rows that have a sampled token, which `totals.sequences` counts."""
    counted = segments.row_counts(inputs.mask, inputs.offsets) > 0
    return {f"{_ROW}{name}": torch.where(counted, values.detach(), 0.0).sum() for name, values in metrics.items()}


def _column(rows: DataProto, name: str, device: torch.device) -> Tensor:
    return rows.ragged(name).values.to(device)


REQUIRED_BY_POLICY: Sequence[str] = (INPUT_IDS, LOSS_MASK, TURN_IDS, ADVANTAGES, ROLLOUT_LOG_PROBS)
REQUIRED_BY_VALUE: Sequence[str] = (INPUT_IDS, LOSS_MASK, TURN_IDS, VALUES, RETURNS)
