"""What the updates learn from: weights, rejected and truncated rows, chosen tokens. Metrics keep all sampled tokens."""

from collections.abc import Callable

import pytest
import torch

from vrl.algorithms.losses.registry import LossParams, get_policy_loss
from vrl.controller.corrections import (
    Corrections,
    MaskTruncated,
    PreferencePairs,
    SelectedTokens,
    correction_params,
    corrections,
    loss_columns,
    no_columns,
)
from vrl.controller.data_metrics import data_metrics
from vrl.controller.trainer import MiniBatches
from vrl.protocol.columns import (
    ADVANTAGES,
    GROUP,
    LOSS_MASK,
    MINI_BATCH,
    OLD_LOG_PROBS,
    ROLLOUT_IS_WEIGHTS,
    ROLLOUT_LOG_PROBS,
    SELECTED,
    TOKEN_LEVEL_REWARDS,
    TOKEN_LEVEL_SCORES,
    UID,
)
from vrl.protocol.config.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from vrl.protocol.config.learner import ActorConfig, PolicyLossConfig
from vrl.protocol.dataproto import DataProto, Meta
from vrl.protocol.errors import ConfigError
from vrl.protocol.ragged import Ragged
from vrl.protocol.rows import batch_of
from vrl.protocol.trajectory import StopReason, Trajectory

GAPS = (0.0, 0.1, 1.0, -0.3)  # learner minus engine, nats on each sampled token of a row


@pytest.fixture
def batch(trajectory: Callable[..., Trajectory]) -> DataProto:
    """Four rows of two prompts; the second one was cut at the token limit, the third is far from the engine."""
    rows = [
        trajectory("u0", turns=(2,), score=1.0),
        trajectory("u0", turns=(5,), score=0.0, stop_reason=StopReason.LENGTH),
        trajectory("u1", turns=(2, 3), score=1.0),
        trajectory("u1", turns=(4,), score=0.0),
    ]
    made = batch_of(rows, None, Meta())
    engine = made.ragged(ROLLOUT_LOG_PROBS)
    gap = torch.repeat_interleave(torch.tensor(GAPS), engine.lengths)
    old = torch.where(made.ragged(LOSS_MASK).values, engine.values + gap, 0.0)
    return made.with_columns(**{OLD_LOG_PROBS: Ragged(old, engine.offsets)})


def correction(**settings: object) -> Corrections:
    return corrections(AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(**settings)))  # type: ignore[arg-type]


def sampled(batch: DataProto, column: str) -> list[list[float]]:
    masks = batch.ragged(LOSS_MASK).to_rows()
    return [row[mask].tolist() for row, mask in zip(batch.ragged(column).to_rows(), masks, strict=True)]


def counts(batch: DataProto) -> list[int]:
    return [int(row.sum()) for row in batch.ragged(LOSS_MASK).to_rows()]


def test_with_nothing_on_the_rows_are_the_same_object(batch: DataProto):
    learnt, metrics = corrections(AlgorithmConfig())(batch)
    assert learnt is batch
    assert metrics == {}
    assert loss_columns(ActorConfig()) is no_columns
    assert no_columns(batch, 1) is batch
    slices = MiniBatches(prompts=1, epochs=1, shuffle=False).assign(batch, 1)
    assert slices.names() - batch.names() == {MINI_BATCH}


def test_token_weights_are_capped_ratios_of_learner_and_engine(batch: DataProto):
    learnt, metrics = correction(rollout_is="token", rollout_is_threshold=2.0)(batch)
    wanted = torch.tensor(GAPS).exp().clamp(max=2.0).tolist()
    for row, weight in zip(sampled(learnt, ROLLOUT_IS_WEIGHTS), wanted, strict=True):
        assert row == pytest.approx([weight] * len(row))
    weights, mask = learnt.ragged(ROLLOUT_IS_WEIGHTS).values, batch.ragged(LOSS_MASK).values
    assert weights.dtype == torch.float32
    assert not weights[~mask].any()
    assert torch.equal(learnt.ragged(LOSS_MASK).values, mask)
    assert ROLLOUT_IS_WEIGHTS not in batch
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(2.0)
    assert metrics["rollout_corr/kl"] == pytest.approx(-(5 * 0.1 + 5 * 1.0 - 4 * 0.3) / 16, rel=1e-5)


def test_sequence_weights_are_equal_within_a_row_and_may_be_normalised(batch: DataProto):
    learnt, metrics = correction(rollout_is="sequence", rollout_is_batch_normalize=True)(batch)
    exact = [min(torch.tensor(gap * n).exp().item(), 2.0) for gap, n in zip(GAPS, (2, 5, 5, 4), strict=True)]
    mean = sum(exact) / 4
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(mean)
    for row, weight in zip(sampled(learnt, ROLLOUT_IS_WEIGHTS), exact, strict=True):
        assert row == pytest.approx([weight / mean] * len(row))


def test_rejected_rows_leave_the_loss_and_nothing_else(batch: DataProto):
    before = data_metrics(batch)
    learnt, metrics = correction(rollout_rs="seq_mean_k3", rollout_rs_threshold=0.1)(batch)
    assert counts(learnt) == [2, 5, 0, 4]  # e^1 - 1 - 1 = 0.72 nats
    assert counts(batch) == [2, 5, 5, 4]
    assert ROLLOUT_IS_WEIGHTS not in learnt
    assert data_metrics(batch) == before
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(5 / 16)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 4)


def test_rejected_tokens_leave_the_loss_one_by_one(batch: DataProto):
    old = batch.ragged(OLD_LOG_PROBS)
    values = old.values.clone()
    values[3] += 2.0  # the first sampled token of the first row
    learnt, _ = correction(rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")(
        batch.with_columns(**{OLD_LOG_PROBS: Ragged(values, old.offsets)})
    )
    assert counts(learnt) == [1, 5, 0, 4]


def test_truncated_rows_train_nothing_and_the_rest_is_corrected(batch: DataProto):
    learnt, metrics = MaskTruncated()(batch)
    assert counts(learnt) == [2, 0, 5, 4]
    assert counts(batch) == [2, 5, 5, 4]
    assert metrics == {"training/masked_truncated": 0.25}
    settings = AlgorithmConfig(
        mask_truncated_completions=True, rollout_correction=RolloutCorrectionConfig(rollout_is="token")
    )
    both, metrics = corrections(settings)(batch)
    assert counts(both) == [2, 0, 5, 4]
    assert metrics["training/masked_truncated"] == 0.25
    assert metrics["rollout_corr/kl"] == pytest.approx(-(5 * 1.0 - 4 * 0.3) / 11, rel=1e-5)


def test_a_batch_that_is_rejected_whole_is_no_error(batch: DataProto):
    learnt, metrics = correction(rollout_is="token", rollout_rs="seq_sum_k2", rollout_rs_threshold=1e-12)(
        batch.rows([1, 2, 3])
    )
    assert counts(learnt) == [0, 0, 0]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_rs": "seq_median_k1", "rollout_rs_threshold": 2.0}, "unknown statistic 'seq_median_k1'"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"}, "takes one upper bound"),
        ({"rollout_is": "token", "rollout_is_threshold": "2.0_0.5"}, "rollout_is_threshold must be a positive"),
        ({"rollout_is": "token", "rollout_is_threshold": 0.0}, "rollout_is_threshold must be a positive"),
    ],
)
def test_what_the_formulas_do_not_have_is_refused(settings: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        correction_params(RolloutCorrectionConfig(**settings))  # type: ignore[arg-type]


def with_noise(batch: DataProto) -> DataProto:
    mask, draw = batch.ragged(LOSS_MASK), torch.Generator().manual_seed(1)

    def noise() -> Ragged:
        return Ragged(torch.where(mask.values, torch.randn(len(mask.values), generator=draw), 7.0), mask.offsets)

    return batch.with_columns(**{ADVANTAGES: noise(), OLD_LOG_PROBS: noise()})


def test_kl_cov_chooses_the_largest_covariances_of_each_mini_batch(batch: DataProto):
    actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.3))
    batches = MiniBatches(prompts=1, epochs=2, shuffle=False, add=loss_columns(actor))
    assigned = batches.assign(with_noise(batch), seed=5)
    assert assigned.ragged(SELECTED).values.dtype == torch.bool
    for rows, tokens in ((slice(0, 2), 7), (slice(2, 4), 9)):
        part = assigned.rows(rows)
        mask = part.ragged(LOSS_MASK).values
        old, advantages = part.ragged(OLD_LOG_PROBS).values[mask], part.ragged(ADVANTAGES).values[mask]
        covariance = (old - old.mean()) * (advantages - advantages.mean())
        wanted = torch.zeros(tokens, dtype=torch.bool)
        wanted[covariance.topk(int(0.3 * tokens)).indices] = True
        assert torch.equal(part.ragged(SELECTED).values[mask], wanted)
        assert not part.ragged(SELECTED).values[~mask].any()


def test_clip_cov_chooses_at_random_by_the_seed_and_never_a_rejected_token(batch: DataProto):
    noisy = with_noise(batch)
    mask = noisy.ragged(LOSS_MASK)
    kept = mask.values.clone()
    kept[mask.values.nonzero()[:3]] = False
    rows = noisy.with_columns(**{LOSS_MASK: Ragged(kept, mask.offsets)})
    choose = SelectedTokens(
        get_policy_loss("clip_cov"), LossParams(clip_cov_ratio=0.2, clip_cov_lb=-9.0, clip_cov_ub=9.0)
    )
    batches = MiniBatches(prompts=2, epochs=1, shuffle=False, add=choose)
    chosen = [batches.assign(rows, seed).ragged(SELECTED).values for seed in (1, 1, 2)]
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])
    for selected in chosen:
        assert int(selected.sum()) == int(0.2 * 13)
        assert not selected[~kept].any()


def test_only_pairs_with_a_preference_are_learnt(trajectory: Callable[..., Trajectory]):
    pairs = {"u0": (1.0, 0.0), "u1": (0.7, 0.7), "u2": (1.0,), "u3": (0.0, 0.5)}
    rows = [trajectory(uid, score=score, sample_index=i) for uid, both in pairs.items() for i, score in enumerate(both)]
    scored = batch_of(rows, None, Meta())
    scored = scored.with_columns(**{TOKEN_LEVEL_REWARDS: scored.ragged(TOKEN_LEVEL_SCORES)})
    chain = corrections(AlgorithmConfig(), get_policy_loss("dpo"))
    assert chain.parts == (PreferencePairs(),)
    learnt, metrics = chain(scored)
    assert list(learnt.objects[UID]) == ["u0", "u0", "u3", "u3"]
    assert metrics == {"training/pairs": 2.0, "training/pairs_without_preference": 2.0}
    assert len(chain(scored.rows([2, 3, 4]))[0]) == 0
    actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="dpo"))
    assigned = MiniBatches(prompts=1, epochs=1, shuffle=False, add=loss_columns(actor)).assign(learnt, 1)
    assert assigned.dense(GROUP).tolist() == [0, 0, 1, 1]
    assert assigned.dense(MINI_BATCH).tolist() == [[0], [0], [1], [1]]
    nothing = MiniBatches(prompts=1, epochs=2, shuffle=False, add=loss_columns(actor)).assign(learnt[:0], 1)
    assert nothing.dense(MINI_BATCH).shape == (0, 2)
    assert corrections(AlgorithmConfig(), get_policy_loss("tba")).parts == ()
