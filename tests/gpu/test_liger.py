"""Liger's kernels give the loss and the gradient of the layers they stand in for."""

from pathlib import Path

import pytest
import torch

from tests.workers.learner_process import objective_of, rows_of
from tests.workers.rig import build_tiny, config_of, context_of
from vrl.models import liger
from vrl.models.loading import load_policy
from vrl.models.policy import CausalPolicy


def loss_and_gradient(policy: CausalPolicy, kind: str, folder: Path) -> tuple[float, float]:
    context = context_of(config_of(folder))
    objective, rows = objective_of(context), rows_of(context, kind)
    packed = context.packer().pack(rows, next(policy.parameters()).device)
    loss = objective(policy, packed, rows, objective.counts(rows)).loss
    loss.backward()
    return float(loss.detach()), float(
        torch.nn.utils.get_total_norm([p.grad for p in policy.parameters() if p.grad is not None])
    )


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_5_vl"])
def test_loss_and_gradient_are_the_same(kind: str, tmp_path: Path) -> None:
    folder = build_tiny(kind, tmp_path)
    fast, plain = (load_policy(folder, torch.float32).cuda() for _ in range(2))
    liger.apply(fast.hf)
    assert "LigerRMSNorm" in str(fast.hf)
    assert "LigerSwiGLUMLP" in str(fast.hf)
    found, wanted = (loss_and_gradient(policy, kind, folder) for policy in (fast, plain))
    assert found == pytest.approx(wanted, rel=1e-4)
    assert wanted[1] > 1e-3


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_5_vl"])
def test_models_loaded_later_are_left_alone(kind: str, tmp_path: Path) -> None:
    folder = build_tiny(kind, tmp_path)
    liger.apply(load_policy(folder, torch.float32).hf)
    assert "Liger" not in str(load_policy(folder, torch.float32).hf)
