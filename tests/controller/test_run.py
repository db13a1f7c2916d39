"""Whole runs of `vrl train` on real Ray, FSDP2 and vLLM: what they leave behind, equality, resume, failure."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import ray

from vrl.controller.cli import main

pytestmark = pytest.mark.ray
Capsys = pytest.CaptureFixture[str]

REPOSITORY = Path(__file__).parents[2]
BASE = (
    "trainer.deterministic=True",
    "trainer.val_before_train=False",
    "warm_start.steps=20",
    "data.val_max_samples=40",
    "data.train_batch_size=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=6",
    "actor_rollout_ref.rollout.n=4",
    "trainer.logger=[console]",
)
TIMING = ("timing_", "perf/")
PPO = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
)

OWN_POOL = ("critic.resource_pool.enable=True", "critic.resource_pool.n_gpus_per_node=1")


def command(folder: Path, settings: Sequence[str], name: str = "train") -> list[str]:
    run = ["--config-name", "tiny_vl_grpo", f"trainer.default_local_dir={folder}", *BASE, *settings]
    return [sys.executable, "-m", "vrl.controller.cli", name, *run]


def train(root: Path, name: str, settings: Sequence[str]) -> Path:
    """Run in `root`, where model, data and warm start are shared; return the run folder."""
    folder = root / name
    done = subprocess.run(command(folder, settings), cwd=root, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    (folder / "console.txt").write_text(done.stdout)
    return folder


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMING)} for line in lines]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def first(root: Path) -> Path:
    return train(root, "first", ["trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.test_freq=2",
                                 "trainer.max_actor_ckpt_to_keep=2"])  # fmt: skip


def test_a_run_leaves_a_readable_folder(first: Path) -> None:
    assert (first / "config.yaml").is_file()
    assert (first / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    assert sorted(path.name for path in (first / "checkpoints").iterdir()) == ["global_step_2", "global_step_4"]
    rows = [json.loads(line) for line in (first / "rollouts" / "step_1.jsonl").read_text().splitlines()]
    assert len(rows) == 6 * 4
    assert all(Path(first / "rollouts" / image).is_file() for row in rows for image in row["images"])
    assert any(row["images"] for row in rows)
    assert "step 4/4" in (first / "console.txt").read_text()


def test_engine_and_trainer_agree_in_every_step(first: Path) -> None:
    steps = metrics_of(first)
    assert [step["training/global_step"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert step["training/rollout_probs_diff_mean"] <= 1e-5
        assert step["training/rollout_probs_diff_max"] <= 1e-4
        assert step["actor/pg_clipfrac"] == 0
        assert step["training/failed_rows"] == 0
        assert 0 <= step["critic/score/mean"] <= 1
        assert step["actor/grad_norm"] >= 0
    assert {"val-core/tiny/visual/reward/mean@1", "val-core/tiny/visual/reward/greedy"} <= steps[1].keys()


def test_equal_seeds_give_equal_runs(root: Path, first: Path) -> None:
    second = train(root, "second", ["trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.test_freq=2",
                                    "trainer.max_actor_ckpt_to_keep=2"])  # fmt: skip
    assert metrics_of(second) == metrics_of(first)


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(root: Path, first: Path) -> None:
    part = root / "resumed"
    shutil.copytree(first, part, ignore=shutil.ignore_patterns("global_step_4", ".lock"))
    resumed = train(root, "resumed", ["trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.test_freq=2",
                                      "trainer.max_actor_ckpt_to_keep=2"])  # fmt: skip
    assert metrics_of(resumed) == metrics_of(first)


def test_a_finished_run_says_so_and_does_nothing(root: Path, first: Path) -> None:
    before = (first / "metrics.jsonl").read_text()
    begin = time.monotonic()
    settings = ["trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.test_freq=2"]
    done = subprocess.run(command(first, settings), cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    assert (first / "metrics.jsonl").read_text() == before
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("step", [4, 2])
def test_an_evaluation_finds_what_the_run_found_and_leaves_it_alone(root: Path, first: Path, step: int) -> None:
    def contents() -> dict[Path, bytes]:
        inside = [path for path in first.rglob("*") if path.is_file() and "evaluations" not in path.parts]
        return {path: path.read_bytes() for path in inside}

    before = contents()
    named = f"trainer.resume_from_path={first}/checkpoints/global_step_{step}"
    settings = ["trainer.total_training_steps=4", "data.train_files=[]"]
    settings += ["trainer.resume_mode=resume_path", named] if step != 4 else []
    run = command(first, settings, "eval")
    done = subprocess.run(run, cwd=root, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert f"evaluating {first}/checkpoints/global_step_{step}\n" in done.stdout
    (folder,) = (first / "evaluations").glob(f"global_step_{step}-*")
    (found,) = metrics_of(folder)
    (wanted,) = (line for line in metrics_of(first) if line["training/global_step"] == step)
    assert any(name.startswith("val-core/") for name in found)
    assert found == {name: wanted[name] for name in found}
    assert (folder / "validation" / f"step_{step}.jsonl").is_file()
    assert contents() == before


@pytest.fixture(scope="module")
def ppo(root: Path) -> Path:
    return train(root, "ppo", PPO)


def test_ppo_with_critic_reference_and_several_updates(ppo: Path) -> None:
    for step in metrics_of(ppo):
        assert step["training/rollout_probs_diff_mean"] <= 1e-5
        assert step["critic/vf_loss"] >= 0
        assert "critic/vf_explained_var" in step
        assert step["critic/grad_norm"] > 0
        assert step["actor/kl_loss"] >= 0
    # The reference is the policy before the first update: no KL in the first step's reward, some in the second's.
    assert abs(metrics_of(ppo)[0]["actor/reward_kl_penalty"]) < 1e-5
    assert abs(metrics_of(ppo)[1]["actor/reward_kl_penalty"]) > 1e-6


def test_the_stages_of_each_role_are_seen(ppo: Path) -> None:
    for line in (ppo / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        for call in ("old_log_prob", "ref", "values", "update_critic", "update_actor"):
            assert 0 < step[f"timing_s/{call}/forward"] < step[f"timing_s/{call}"]
            assert (f"timing_s/{call}/backward" in step) == call.startswith("update_")
        assert not any(f"timing_s/{stage}" in step for stage in ("data", "forward", "backward", "optimizer"))


@pytest.mark.long
def test_ranks_that_share_sequences_train_alike(root: Path, ppo: Path) -> None:
    shared = ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "critic.ulysses_sequence_parallel_size=2"]
    found, wanted = (metrics_of(folder) for folder in (train(root, "ulysses", [*PPO, *shared]), ppo))
    assert [step["training/global_step"] for step in found] == [1, 2]
    for name in ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "critic/vf_loss",
                 "critic/grad_norm", "critic/values/mean", "critic/score/mean"):  # fmt: skip
        assert found[0][name] == pytest.approx(wanted[0][name], rel=1e-4, abs=1e-6), name
    assert found[1]["training/rollout_probs_diff_mean"] <= 1e-5


def test_a_critic_on_a_pool_of_its_own_trains_alike(root: Path, ppo: Path) -> None:
    found, wanted = (metrics_of(folder) for folder in (train(root, "pool", [*PPO, *OWN_POOL]), ppo))
    assert [step.keys() for step in found] == [step.keys() for step in wanted]
    for step, other in zip(found, wanted, strict=True):
        for name in step:
            # The first weights are equal; after an update, rounding in it grows.
            tolerance = 1e-5 if step is found[0] else 1e-3
            assert step[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance * 1e-2), name


def test_rollout_correction_and_clip_cov_in_two_steps(root: Path) -> None:
    folder = train(
        root,
        "corrected",
        [
            "algorithm.rollout_correction.rollout_is=token",
            "algorithm.rollout_correction.rollout_rs=seq_mean_k3",
            "algorithm.rollout_correction.rollout_rs_threshold=0.01",
            "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
            "actor_rollout_ref.actor.policy_loss.clip_cov_lb=0.0",
            "actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.1",
            "reward_model.overlong_buffer.enable=True",
            "reward_model.overlong_buffer.len=1",
            "reward_model.overlong_buffer.penalty_factor=0.5",
            "trainer.total_training_steps=2",
            "trainer.test_freq=-1",
            "trainer.rollout_data_dir=read/rollouts",
            "trainer.validation_data_dir=read/validation",
            "trainer.log_val_generations=2",
            "trainer.logger=[console,tensorboard]",
        ],
    )
    assert {path.name for path in (root / "read" / "rollouts").glob("*.jsonl")} == {"step_1.jsonl", "step_2.jsonl"}
    assert {path.name for path in (root / "read" / "validation").glob("*.jsonl")} == {"step_2.jsonl"}
    (events,) = (folder / "tensorboard").iterdir()
    assert events.read_bytes().count(b"val/generations/1") == 1
    steps = metrics_of(folder)
    assert len(steps) == 2
    for step in steps:
        # Engine and learner agree: weights are 1, nothing is rejected, and the mismatch is the driver's to report.
        assert abs(step["rollout_corr/rollout_is_mean"] - 1.0) < 1e-4
        assert step["rollout_corr/rollout_rs_masked_fraction"] == 0
        assert abs(step["rollout_corr/kl"]) < 1e-4
        assert step["training/rollout_probs_diff_mean"] <= 1e-5
        assert step["actor/grad_norm"] > 0
        assert -0.5 <= step["critic/overlong_reward/mean"] <= 0
    # Chosen tokens are the clipped ones of the only update: a tenth at most, and some where advantages differ.
    assert all(0 <= step["actor/pg_clipfrac"] <= 0.1 for step in steps)
    assert any(step["actor/pg_clipfrac"] > 0 for step in steps)


def test_rewards_that_fail_are_left_out_or_stop_the_run(root: Path) -> None:
    (root / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if data_source == 'tiny/visual':\n"
        "        raise RuntimeError('no eyes')\n"
        "    return float(solution_str.strip() == ground_truth)\n"
    )
    settings = ["trainer.total_training_steps=1", "trainer.test_freq=-1", "custom_reward_function.path=reward.py",
                "actor_rollout_ref.rollout.agent.max_failed_ratio=1.0"]  # fmt: skip
    folder = train(root, "skips", settings)
    (step,) = metrics_of(folder)
    assert step["training/failed_rows"] > 0
    assert step["training/num_rows"] + step["training/failed_rows"] == 24
    rows = [json.loads(line) for line in (folder / "rollouts" / "step_1.jsonl").read_text().splitlines()]
    assert any("no eyes" in str(row["score_extra"]) for row in rows)
    done = subprocess.run(
        command(root / "stops", [*settings, "reward_model.on_failure=stop"]),
        cwd=root, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "no eyes" in done.stderr


def test_a_killed_worker_ends_the_run_within_a_minute(root: Path) -> None:
    process = subprocess.Popen(
        command(root / "killed", ["trainer.total_training_steps=10000", "trainer.test_freq=-1"]),
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if re.match(r"step +2/", line):
                break
        children = psutil.Process(process.pid).children(recursive=True)
        workers = [child for child in children if "WorkerHost" in " ".join(child.cmdline())]
        assert len(workers) == 2
        killed = workers[1]  # by process number: either rank
        killed.send_signal(signal.SIGKILL)
        begin = time.monotonic()
        _, stderr = process.communicate(timeout=60)
        assert time.monotonic() - begin < 60
        assert process.returncode not in (0, None)
        assert re.search(r"the process of rank [01] died", stderr), stderr
        assert f"pid: {killed.pid}\n" in stderr
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < deadline, "processes are left over"
        time.sleep(0.5)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.train_files=[nowhere.parquet]", "nowhere.parquet"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=3", "tensor_model_parallel_size"),
        ("custom_reward_function.path=nowhere.py", "nowhere.py"),
        ("data.max_prompt_length=4", "max_prompt_length"),
        ("algorithm.adv_estimator=nonsense", "nonsense"),
        ("data.train_batch_size=100000", "train_batch_size"),
        ("actor_rollout_ref.model.path=nowhere", "nowhere"),
    ],
)
def test_bad_input_gets_one_clear_message(
    root: Path, first: Path, setting: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(root)
    settings = [setting, "trainer.total_training_steps=1", "prepare.model=null", "prepare.data=null",
                "warm_start.enable=False"]  # fmt: skip
    assert main(command(root / "bad", settings)[3:]) not in (0, None)
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not ray.is_initialized()
