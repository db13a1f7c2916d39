"""The tiny run on one GPU: flash attention where installed, the engine asleep while learners work, weights back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = (
    "trainer.device=cuda",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=4",
    "trainer.test_freq=2",
    "trainer.save_freq=4",
    "trainer.logger=[console]",
    "warm_start.steps=20",
    "data.val_max_samples=40",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
)


OFFLOAD = (
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "critic.fsdp_config.param_offload=True",
    "critic.fsdp_config.optimizer_offload=True",
    "actor_rollout_ref.model.enable_activation_offload=True",
    "actor_rollout_ref.actor.use_kl_loss=True",
)


@pytest.mark.parametrize(("estimator", "more"), [("grpo", ()), ("gae", ()), ("gae", OFFLOAD)])
def test_a_run_with_evaluations_between_steps(tmp_path: Path, estimator: str, more: tuple[str, ...]) -> None:
    """An evaluation follows a weight sync, before the next sleep: an engine asleep has no weights to answer with."""
    given = [f"trainer.default_local_dir={tmp_path / 'run'}", f"algorithm.adv_estimator={estimator}", *SETTINGS, *more]
    done = subprocess.run(
        [sys.executable, "-m", "vrl.controller.cli", "train", "--config-name", "tiny_vl_grpo", *given],
        cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "timing_s/step" in line]
    assert [step["training/global_step"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert step["training/failed_rows"] == 0
        assert step["training/rollout_probs_diff_mean"] < 0.02  # bfloat16 in both
    assert "val-core/tiny/visual/reward/mean@1" in steps[1]
    assert (tmp_path / "run" / "checkpoints" / "global_step_4").is_dir()
