"""The requirements on the policy losses: clips, masks, ratios, missing inputs; pairs and groups of whole-row losses."""

import dataclasses
import math

import pytest
import torch

from vrl.algorithms.aggregation import aggregate, counts, token_sums
from vrl.algorithms.losses.registry import LossInputs, LossParams, get_policy_loss, known_policy_losses
from vrl.algorithms.losses.value_loss import value_loss

ALL = [get_policy_loss(name) for name in known_policy_losses()]
OVER_TOKENS = [loss for loss in ALL if not loss.needs_whole_groups]


def tokens(log_ratios, advantages, mask=None):
    """One row whose old log-probs are -1 and whose ratios are exp(log_ratios)."""
    old = torch.full((len(log_ratios),), -1.0)
    return LossInputs(
        log_probs=(old + torch.tensor(log_ratios, dtype=torch.float32)).requires_grad_(),
        old_log_probs=old,
        advantages=torch.tensor(advantages, dtype=torch.float32),
        mask=torch.tensor(mask if mask is not None else [1] * len(log_ratios)).bool(),
        offsets=torch.tensor([0, len(log_ratios)]),
    )


def completed(loss, inputs):
    """With everything that this loss needs: tokens of its own choice, one group, the policy of before as reference."""
    if loss.needs_whole_groups:
        rows = inputs.offsets.numel() - 1
        inputs = dataclasses.replace(
            inputs,
            ref_log_probs=inputs.old_log_probs,
            group=torch.zeros(rows, dtype=torch.int64),
            scores=torch.arange(rows, dtype=torch.float32),
            rollout_is_weights=None,
        )
    return dataclasses.replace(inputs, selected=loss.select(inputs, LossParams(), torch.Generator()))


def pair(log_ratios, **changes):
    """Two rows of one token each, one group, scores 0 and 1."""
    inputs = dataclasses.replace(tokens(log_ratios, [1.0, 1.0]), offsets=torch.tensor([0, 1, 2]))
    return dataclasses.replace(completed(get_policy_loss("dpo"), inputs), **changes)


def token_mean(inputs, outputs):
    return aggregate(outputs.per_token, inputs.mask, inputs.offsets, "token-mean", counts(inputs.mask, inputs.offsets))


@pytest.mark.parametrize(
    ("advantage", "ratio", "high", "loss"),
    [
        (1, 5, 0.2, -1.2),
        (1, 0.5, 0.2, -0.5),
        (-1, 5, 0.2, 3.0),
        (-1, 2, 0.2, 2.0),
        (-1, 0.5, 0.2, 0.8),
        (2, 10, 0.2, -2.4),
        (-2, 10, 0.2, 6.0),
        (1, 1.5, 0.28, -1.28),
    ],
)
def test_rb2_dual_clip_only_for_negative_advantages(advantage, ratio, high, loss):
    params = LossParams(clip_ratio_low=0.2, clip_ratio_high=high, clip_ratio_c=3.0)
    outputs = get_policy_loss("vanilla")(tokens([math.log(ratio)], [advantage]), params)
    torch.testing.assert_close(outputs.per_token.detach(), torch.tensor([loss]))
    assert outputs.metrics["pg_clipfrac_lower"].tolist() == [float(advantage < 0 and ratio > 3)]


@pytest.mark.parametrize("c", [1.0, 0.5, -3.0])
def test_rb2_dual_clip_bound_up_to_one_is_refused(c):
    with pytest.raises(ValueError, match="clip_ratio_c must be above 1"):
        LossParams(clip_ratio_c=c)


def test_other_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="clip_ratio_low and clip_ratio_high"):
        LossParams(clip_ratio_low=-0.1)
    with pytest.raises(ValueError, match="tau_pos and tau_neg"):
        LossParams(tau_neg=0.0)
    for wrong in (
        {"clip_cov_ratio": 1.5},
        {"kl_cov_ratio": -0.1},
        {"clip_cov_lb": 5.0},
        {"dro_beta": 0.0},
        {"tba_beta": 0.0},
        {"dpo_beta": -1.0},
        {"dpo_loss_type": "hinge"},
        {"dpo_label_smoothing": 0.5},
        {"dpo_label_smoothing": 0.1, "dpo_loss_type": "ipo"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LossParams(**wrong)
    with pytest.raises(ValueError, match="cliprange_value"):
        value_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.ones(1).bool(), -0.5)


@pytest.mark.parametrize("loss", ALL, ids=known_policy_losses())
def test_rb5_batch_without_trainable_token_is_zero(loss):
    inputs = LossInputs(
        log_probs=torch.tensor([math.nan, math.inf, -1.0], requires_grad=True),
        old_log_probs=torch.tensor([math.nan, -1.0, math.inf]),
        advantages=torch.tensor([math.nan, math.inf, 1.0]),
        mask=torch.zeros(3, dtype=torch.bool),
        offsets=torch.tensor([0, 2, 3]),
        rollout_is_weights=torch.tensor([math.nan, 0.0, math.inf]),
    )
    outputs = loss(completed(loss, inputs), LossParams())
    total = token_mean(inputs, outputs)
    total.backward()
    assert total.item() == 0.0
    assert inputs.log_probs.grad.tolist() == [0.0, 0.0, 0.0]
    assert all(total.item() == 0.0 for total in token_sums(outputs.metrics, inputs.mask).values())


@pytest.mark.parametrize(("advantages", "loss"), [([2.0, 2.0, 2.0], -2.0), ([0.0, 5.0, 0.0], 0.0)])
def test_rb9_loss_uses_the_mask_and_not_the_advantages(advantages, loss):
    inputs = tokens([0.0] * 3, advantages, mask=[1, 0, 1])
    assert token_mean(inputs, get_policy_loss("vanilla")(inputs, LossParams())).item() == loss


def test_rb9_a_mask_of_another_kind_is_refused():
    wrong = {"log_probs": torch.zeros(2), "old_log_probs": torch.zeros(2), "offsets": torch.tensor([0, 2])}
    with pytest.raises((ValueError, TypeError), match="mask"):  # TypeError: from the shape checks of the test run
        LossInputs(advantages=torch.ones(2), mask=torch.ones(2), **wrong)
    with pytest.raises((ValueError, TypeError), match="advantages"):
        LossInputs(advantages=torch.ones(3), mask=torch.ones(2).bool(), **wrong)


@pytest.mark.parametrize("loss", OVER_TOKENS, ids=[loss.name for loss in OVER_TOKENS])
def test_rb11_on_policy_ratio_is_one(loss):
    """Unchanged weights: the gradient is the plain policy gradient -A and no token counts as clipped."""
    inputs = tokens([0.0] * 4, [1.0, 1.0, 1.0, 1.0])
    outputs = loss(completed(loss, inputs), LossParams())
    outputs.per_token.sum().backward()
    torch.testing.assert_close(inputs.log_probs.grad, torch.full((4,), -1.0))
    assert all(values.sum() == 0.0 for values in outputs.metrics.values())


@pytest.mark.parametrize("loss", [loss for loss in ALL if loss.needs_whole_groups], ids=["dpo", "tba"])
def test_importance_weights_have_no_place_in_losses_over_whole_rows(loss):
    inputs = pair([0.0, 0.0], rollout_is_weights=torch.ones(2))
    with pytest.raises(ValueError, match=rf"{loss.name} has no place for importance weights: set .*rollout_is=null"):
        loss(inputs, LossParams())


@pytest.mark.parametrize("loss", ALL, ids=known_policy_losses())
@pytest.mark.parametrize("gap", [130.0, -130.0])
def test_far_off_token_stays_finite(loss, gap):
    for advantage in (1.0, -1.0):
        inputs = dataclasses.replace(tokens([gap, 0.0], [advantage, advantage]), offsets=torch.tensor([0, 1, 2]))
        outputs = loss(completed(loss, inputs), LossParams())
        outputs.per_token.sum().backward()
        assert torch.isfinite(outputs.per_token).all()
        assert torch.isfinite(inputs.log_probs.grad).all()


@pytest.mark.parametrize("loss", ALL, ids=known_policy_losses())
def test_nan_on_a_sampled_token_is_not_hidden(loss):
    inputs = dataclasses.replace(tokens([math.nan, 0.0], [1.0, 1.0]), offsets=torch.tensor([0, 1, 2]))
    assert torch.isnan(token_mean(inputs, loss(completed(loss, inputs), LossParams())))


@pytest.mark.parametrize(
    ("name", "missing", "remedy"),
    [
        ("clip_cov", "selected", "call select on all rows of the mini-batch"),
        ("kl_cov", "selected", "call select on all rows of the mini-batch"),
        ("tba", "ref_log_probs", "give the run a reference policy"),
        ("dpo", "ref_log_probs", "give the run a reference policy"),
        ("tba", "group", "whole groups in one micro-batch"),
        ("dpo", "scores", "the rewards of the rows"),
    ],
)
def test_missing_inputs_are_named_with_a_way_out(name, missing, remedy):
    loss = get_policy_loss(name)
    inputs = dataclasses.replace(completed(loss, pair([0.0, 0.0])), **{missing: None})
    with pytest.raises(ValueError, match=f"policy loss {name} needs {missing}: .*{remedy}"):
        loss(inputs, LossParams())


@pytest.mark.parametrize("name", ["ref_log_probs", "selected", "group", "scores"])
def test_optional_inputs_of_another_length_are_refused(name):
    inputs = pair([0.0, 0.0])
    with pytest.raises((ValueError, TypeError), match=name):  # TypeError: from the shape checks of the test run
        dataclasses.replace(inputs, **{name: getattr(inputs, name)[:1]})


def test_dpo_trains_the_larger_score_up_and_ties_go_to_the_first():
    for scores, sign in (([0.0, 1.0], 1.0), ([1.0, 0.0], -1.0), ([1.0, 1.0], -1.0)):
        inputs = pair([0.0, 0.0], scores=torch.tensor(scores))
        outputs = get_policy_loss("dpo")(inputs, LossParams(dpo_beta=0.5))
        outputs.per_row.mean().backward()
        torch.testing.assert_close(inputs.log_probs.grad, torch.tensor([sign, -sign]) * 0.25)
        torch.testing.assert_close(outputs.per_row.detach(), torch.full((2,), math.log(2.0), dtype=torch.float64))


def test_dpo_refuses_more_than_two_rows_and_leaves_a_row_alone_untrained():
    three = dataclasses.replace(tokens([0.0] * 3, [1.0] * 3), offsets=torch.tensor([0, 1, 2, 3]))
    three = completed(get_policy_loss("dpo"), three)
    with pytest.raises(ValueError, match=r"got a group of 3 rows: set actor_rollout_ref\.rollout\.n=2"):
        get_policy_loss("dpo")(three, LossParams())
    alone = pair([0.3, 0.0], group=torch.tensor([4, 9]))
    outputs = get_policy_loss("dpo")(alone, LossParams())
    outputs.per_row.sum().backward()
    assert outputs.per_row.tolist() == [0.0, 0.0]
    assert alone.log_probs.grad.tolist() == [0.0, 0.0]


def test_losses_over_whole_rows_do_not_depend_on_where_rows_stand():
    """Interleaved groups, and each group in a micro-batch of its own, give the losses of the rows in order."""
    row = torch.arange(8)
    group = row // 2
    for name in ("tba", "dpo"):
        losses = {}
        for order in (row, torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]), row[:2], row[2:]):
            old = torch.full((8,), -1.0)
            inputs = LossInputs(
                log_probs=(old + 0.1 * row)[order],
                old_log_probs=old[order],
                advantages=old[order],
                mask=torch.ones(len(order), dtype=torch.bool),
                offsets=torch.arange(len(order) + 1),
                ref_log_probs=old[order],
                group=group[order],
                scores=(row * 3 % 5).float()[order],
            )
            per_row = get_policy_loss(name)(inputs, LossParams(tba_beta=1.0)).per_row
            for index, value in zip(order.tolist(), per_row.tolist(), strict=True):
                assert losses.setdefault(index, value) == pytest.approx(value, rel=1e-12)
