"""The policy's objective on a real tiny model: importance weights, rejected and chosen tokens in the gradient."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vrl.algorithms.losses.registry import get_policy_loss
from vrl.models.loading import load_policy
from vrl.models.policy import CausalPolicy
from vrl.protocol.columns import (
    ADVANTAGES,
    INPUT_IDS,
    LOSS_MASK,
    OLD_LOG_PROBS,
    ROLLOUT_IS_WEIGHTS,
    ROLLOUT_LOG_PROBS,
    SELECTED,
    TURN_IDS,
)
from vrl.protocol.config.learner import ActorConfig, PolicyLossConfig
from vrl.protocol.dataproto import DataProto
from vrl.protocol.ragged import Ragged
from vrl.workers.losses import PolicyObjective, SamplingDistribution, loss_params
from vrl.workers.microbatch import Packer

LENGTHS = ((3, 4), (2, 6), (4, 2))  # prompt and answer
CLOSE = {"rtol": 1e-3, "atol": 2e-6}


@pytest.fixture(scope="module")
def policy(tiny_folder: Callable[[str], Path]) -> CausalPolicy:
    return load_policy(str(tiny_folder("qwen2")), torch.float32)


def objective(name: str = "vanilla", **settings: float) -> PolicyObjective:
    return PolicyObjective(
        loss=get_policy_loss(name),
        params=loss_params(ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name, **settings))),
        sampling=SamplingDistribution(temperature=1.0, banned_ids=(), chunk_tokens=64),
        mode="token-mean",
        norm_length=None,
        entropy_coeff=0.0,
        kl_coef=None,
        kl_type="low_var_kl",
    )


def gradient(policy: CausalPolicy, rows: DataProto, goal: PolicyObjective) -> Tensor:
    policy.zero_grad(set_to_none=True)
    goal(policy, Packer(None, False).pack(rows, torch.device("cpu")), rows, goal.counts(rows)).loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@pytest.fixture(scope="module")
def rows(policy: CausalPolicy) -> DataProto:
    """Three rows with random advantages and the policy's own log-probs as old ones: the first update of a step."""
    draw = torch.Generator().manual_seed(2)
    masks = [[0] * prompt + [1] * answer for prompt, answer in LENGTHS]
    ids = Ragged.from_rows([torch.randint(30, 200, (len(m),), generator=draw).tolist() for m in masks], torch.int64)
    total = len(ids.values)
    made = DataProto(
        {
            INPUT_IDS: ids,
            LOSS_MASK: Ragged.from_rows(masks, torch.bool),
            TURN_IDS: Ragged.from_rows([[k - 1 for k in mask] for mask in masks], torch.int32),
            ADVANTAGES: Ragged(torch.randn(total, generator=draw), ids.offsets),
            ROLLOUT_LOG_PROBS: Ragged(torch.zeros(total), ids.offsets),
        }
    )
    with torch.no_grad():
        old = policy(Packer(None, False).pack(made, torch.device("cpu"))).log_probs
    return made.with_columns(**{OLD_LOG_PROBS: Ragged(old, ids.offsets)})


def changed(rows: DataProto, column: str, values: Tensor) -> DataProto:
    return rows.with_columns(**{column: Ragged(values, rows.ragged(INPUT_IDS).offsets)})


def test_without_the_columns_nothing_changes(policy: CausalPolicy, rows: DataProto):
    plain = gradient(policy, rows, objective())
    assert plain.norm() > 0
    ones = changed(rows, ROLLOUT_IS_WEIGHTS, torch.ones(len(rows.ragged(INPUT_IDS).values)))
    assert torch.equal(gradient(policy, ones, objective()), plain)


def test_weights_multiply_the_gradient_of_their_tokens(policy: CausalPolicy, rows: DataProto):
    advantages = rows.ragged(ADVANTAGES).values
    weights = torch.rand(len(advantages), generator=torch.Generator().manual_seed(4)) * 2
    weighted = gradient(policy, changed(rows, ROLLOUT_IS_WEIGHTS, weights), objective())
    by_formula = gradient(policy, changed(rows, ADVANTAGES, advantages * weights), objective())
    torch.testing.assert_close(weighted, by_formula, **CLOSE)
    assert not torch.allclose(weighted, gradient(policy, rows, objective()), rtol=1e-2)


def test_rejected_tokens_have_no_gradient_and_do_not_count(policy: CausalPolicy, rows: DataProto):
    mask, advantages = rows.ragged(LOSS_MASK).values, rows.ragged(ADVANTAGES).values
    kept = mask.clone()
    kept[mask.nonzero()[[0, 5, 6]]] = False
    left = gradient(policy, changed(rows, LOSS_MASK, kept), objective())
    others = torch.where(kept, advantages, 1e6)
    assert torch.equal(gradient(policy, changed(changed(rows, LOSS_MASK, kept), ADVANTAGES, others), objective()), left)
    zeroed = gradient(policy, changed(rows, ADVANTAGES, torch.where(kept, advantages, 0.0)), objective())
    torch.testing.assert_close(left, zeroed * int(mask.sum()) / int(kept.sum()), **CLOSE)


def test_a_micro_batch_that_is_rejected_whole_has_a_gradient_of_zero(policy: CausalPolicy, rows: DataProto):
    nothing = changed(rows, LOSS_MASK, torch.zeros_like(rows.ragged(LOSS_MASK).values))
    found = gradient(policy, nothing, objective())
    assert found.numel() > 0
    assert not found.any()


def test_tokens_that_clip_cov_chose_have_no_gradient(policy: CausalPolicy, rows: DataProto):
    mask, advantages = rows.ragged(LOSS_MASK).values, rows.ragged(ADVANTAGES).values
    selected = torch.zeros_like(mask)
    selected[mask.nonzero()[[1, 8]]] = True
    found = gradient(policy, changed(rows, SELECTED, selected), objective("clip_cov"))
    by_formula = gradient(policy, changed(rows, ADVANTAGES, torch.where(selected, 0.0, advantages)), objective())
    torch.testing.assert_close(found, by_formula, **CLOSE)
    with pytest.raises(ValueError, match="policy loss clip_cov needs selected"):
        gradient(policy, rows, objective("clip_cov"))


def test_tokens_that_kl_cov_chose_pay_for_moving(policy: CausalPolicy, rows: DataProto):
    mask, old = rows.ragged(LOSS_MASK).values, rows.ragged(OLD_LOG_PROBS).values
    selected = torch.zeros_like(mask)
    selected[mask.nonzero()[[2]]] = True
    moved = changed(changed(rows, SELECTED, selected), OLD_LOG_PROBS, old - 0.5)
    goal = objective("kl_cov", ppo_kl_coef=2.0)
    pays = gradient(policy, moved, goal) - gradient(policy, changed(moved, SELECTED, ~mask), goal)
    still = changed(changed(rows, LOSS_MASK, selected), ADVANTAGES, torch.full(old.shape, -2.0))
    by_formula = gradient(policy, still, objective()) / int(mask.sum())  # 2 * d log_prob, over all sampled tokens
    torch.testing.assert_close(pays, by_formula, **CLOSE)
