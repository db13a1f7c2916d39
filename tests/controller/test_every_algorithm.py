"""Every advantage estimator and every policy loss that a run may name trains the tiny task on real Ray, FSDP2 and vLLM.

Three names go through `vrl train`. Then all names share one Ray, one pair of worker processes and one engine: actor,
critic and trainer are put together anew for each, by the functions that `vrl train` uses, and all start from the same
weights and prompts.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from vrl.controller.checkpoints import Checkpoints
from vrl.controller.compose import load
from vrl.controller.evaluation import Evaluation
from vrl.controller.prepare import prepare
from vrl.controller.rollout_files import RolloutFiles
from vrl.controller.run import Started, role_names, run_length, started, trainer_over, training_sampling
from vrl.controller.run_folder import RunFolder
from vrl.controller.tracking import Sample, Tracker
from vrl.controller.trainer import Outputs, Trainer
from vrl.controller.worker_group import WorkerGroup
from vrl.protocol.config.builder import fill
from vrl.protocol.config.names import ADV_ESTIMATORS, POLICY_LOSSES
from vrl.protocol.config.rules import check
from vrl.protocol.config.schema import Config
from vrl.protocol.errors import WorkerError

pytestmark = pytest.mark.ray

STEPS = 2
BASE = (
    "trainer.deterministic=True",
    "trainer.val_before_train=False",
    f"trainer.total_training_steps={STEPS}",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.logger=[console]",
    "data.val_max_samples=4",
    "data.train_batch_size=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=3",  # two updates a step: ratios other than 1
    "actor_rollout_ref.actor.entropy_coeff=0.0",  # what is left of the gradient comes from the advantages
    "actor_rollout_ref.rollout.n=4",
    "warm_start.steps=20",
    "custom_reward_function.path=reward.py",
)
REWARD = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = float(solution_str.strip() == ground_truth)
    short = 1.0 / (1 + len(solution_str))
    return {"score": right + 0.1 * short, "accuracy": right, "short": short}
"""
NEEDED = {"gdpo": {"gdpo_reward_keys": ["accuracy", "short"], "gdpo_reward_weights": [1.0, 0.1]}}
NEEDED_BY_LOSS = {"dpo": {"rollout": {"n": 2}}}


@dataclass(frozen=True)
class Shared:
    """What all algorithms of this file have in common."""

    run: Started
    rollout: WorkerGroup
    first_row: Mapping[str, Any]  # where the loader stands at the start
    folder: RunFolder
    tracker: Tracker


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory, with model, data and warm start of all runs."""
    folder, before = tmp_path_factory.mktemp("algorithms"), Path.cwd()
    (folder / "reward.py").write_text(REWARD)
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def shared(root: Path) -> Iterator[Shared]:
    config = load("tiny_vl_grpo", BASE).config
    prepare(config)
    with (
        RunFolder.open(root / "all", "") as folder,
        started(config, gpus=False) as run,
        Tracker(folder, run.config, total_steps=STEPS, resume_step=0) as tracker,
    ):
        groups = run.processes.build(["rollout"], run_length(run.config, STEPS), run.config)
        yield Shared(run, groups["rollout"], run.data.loader.state_dict(), folder, tracker)


def outputs_of(config: Config, folder: RunFolder, tracker: Tracker, name: str) -> Outputs:
    return Outputs(
        tracker=tracker,
        rollout_files=RolloutFiles(folder.path / name),
        evaluation=Evaluation(
            prompts=(),
            sampling=training_sampling(config),
            greedy_beside=False,
            files=RolloutFiles(folder.path),
            show=tracker.log_samples,
        ),
        checkpoints=Checkpoints(folder, config.trainer, config.exported_roles),
    )


def new_trainer(shared: Shared, config: Config, outputs: Outputs, steps: int) -> Trainer:
    """Return a trainer over new learners, the engine that is there, and the first rows."""
    learners = [role for role in role_names(config) if role != "rollout"]
    groups = shared.run.processes.build(learners, run_length(config, steps), config) | {"rollout": shared.rollout}
    shared.run.data.loader.load_state_dict(shared.first_row)
    return trainer_over(config, groups, shared.run.data.loader, steps, outputs)


def train(shared: Shared, values: Mapping[str, Any], name: str) -> list[Mapping[str, float]]:
    """Train from the first weights with some settings changed; return the metrics of the steps."""
    config = fill(shared.run.config, values)
    assert check(config) == ()
    trainer = new_trainer(shared, config, outputs_of(config, shared.folder, shared.tracker, name), STEPS)
    trainer.roles.actor.sync_weights_to(trainer.roles.rollout_group, trainer.policy_version)
    steps: list[Mapping[str, float]] = []
    for _ in range(STEPS):
        trainer.global_step += 1
        steps.append(trainer.step(trainer.loader.next_batch()))
    return steps


def assert_trained(steps: list[Mapping[str, float]]) -> None:
    """All numbers are finite, no update was left out, and the rewards reached the gradient."""
    assert len(steps) == STEPS
    for step in steps:
        assert {name: value for name, value in step.items() if value is None or not math.isfinite(value)} == {}
        assert step["training/failed_rows"] == 0
        assert step.get("actor/skipped_in_a_row", 0) == 0
    assert max(step["actor/grad_norm"] for step in steps) > 0


@pytest.mark.parametrize(
    "settings",
    [
        ("algorithm.adv_estimator=remax",),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo",),
        (
            "algorithm.adv_estimator=grpo_turn",
            "algorithm.grpo_turn_over_all_turns=True",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-turn-mean-token-mean",
        ),
    ],
    ids=["remax", "gspo", "grpo_turn"],
)
def test_a_name_on_the_command_line_trains(root: Path, settings: tuple[str, ...]) -> None:
    folder = root / settings[0].rpartition("=")[2]
    run = [sys.executable, "-m", "vrl.controller.cli", "train", "--config-name", "tiny_vl_grpo"]
    run.append(f"trainer.default_local_dir={folder}")
    done = subprocess.run([*run, *BASE, *settings], cwd=root, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert_trained(steps)
    assert all(("critic/reward_baselines/mean" in step) == ("remax" in settings[0]) for step in steps)


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_every_advantage_estimator_trains(shared: Shared, name: str) -> None:
    algorithm = {"adv_estimator": name, **NEEDED.get(name, {})}
    steps = train(shared, {"algorithm": algorithm}, name)
    assert_trained(steps)
    assert any(step["critic/advantages/max"] > step["critic/advantages/min"] for step in steps)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_trains(shared: Shared, name: str) -> None:
    settings = {"actor": {"policy_loss": {"loss_mode": name}}, **NEEDED_BY_LOSS.get(name, {})}
    steps = train(shared, {"actor_rollout_ref": settings}, f"loss_{name}")
    assert_trained(steps)
    if name == "tba":  # log Z is score / beta as long as policy and reference are the same
        assert steps[0]["actor/tba_log_z"] > 0
    if name == "dpo":
        assert steps[0]["training/pairs"] > 0
        assert 0 <= steps[1]["actor/rewards_accuracies"] <= 1


def test_groups_that_do_not_differ_are_left_out_and_more_are_drawn(shared: Shared) -> None:
    settings = {"enable": True, "metric": "accuracy", "max_num_gen_batches": 3}
    steps = train(shared, {"algorithm": {"filter_groups": settings}}, "filtered")
    draws = [step["train/num_gen_batches"] for step in steps]
    position = shared.run.data.loader.state_dict()
    assert (position["epoch"], position["position"]) == (0, 6 * sum(draws))
    for step, drawn in zip(steps, draws, strict=True):
        kept = step["training/groups_kept"]
        assert kept == 6 or drawn == 3
        assert step["training/groups_generated"] == 6 * drawn
        dropped = step["training/groups_dropped_equal"] + step["training/groups_dropped_surplus"]
        assert kept + dropped == 6 * drawn or kept == 0
        assert step.get("training/num_rows", 0) == 4 * kept
    assert any(step.get("actor/grad_norm", 0) > 0 for step in steps)
    first = shared.folder.path / "filtered" / "step_1.jsonl"
    assert len(first.read_text().splitlines()) == 4 * 6 * draws[0]  # people see what was generated


def test_groups_that_do_not_differ_are_left_out_and_none_are_drawn(shared: Shared) -> None:
    steps = train(shared, {"algorithm": {"adv_estimator": "grpo", "zero_variance_filter": True}}, "zero_variance")
    position = shared.run.data.loader.state_dict()
    assert (position["epoch"], position["position"]) == (0, 6 * STEPS)
    for number, step in enumerate(steps, 1):
        assert step["training/groups_generated"] == step["training/groups_kept"] + step["training/groups_dropped_equal"]
        assert step["training/rows_dropped"] == 4 * step["training/groups_dropped_equal"]
        assert step.get("training/num_rows", 0) == 4 * step["training/groups_kept"]
        assert step.get("training/groups_without_variance", 0) == 0
        file = shared.folder.path / "zero_variance" / f"step_{number}.jsonl"
        assert len(file.read_text().splitlines()) == 4 * 6  # people see what was generated
    assert any(step["training/rows_dropped"] > 0 for step in steps)
    assert any(step.get("actor/grad_norm", 0) > 0 for step in steps)


def test_lora_trains_actor_and_critic_with_the_base_as_reference(shared: Shared) -> None:
    values = {
        "algorithm": {"adv_estimator": "gae", "use_kl_in_reward": True},
        "actor_rollout_ref": {"model": {"lora_rank": 8}, "actor": {"optim": {"lr": 5e-3, "lr_warmup_steps": 0}}},
        "critic": {"model": {"lora_rank": 4}},
    }
    steps = train(shared, values, "lora")
    assert_trained(steps)
    for step in steps:
        assert step["training/rollout_probs_diff_max"] <= 1e-4  # the engine has the adapter
        assert step["critic/grad_norm"] > 0
    assert abs(steps[0]["actor/reward_kl_penalty"]) < 1e-6
    assert abs(steps[1]["actor/reward_kl_penalty"]) > 1e-6


def test_ranks_that_share_sequences_train(shared: Shared) -> None:
    sizes = {"actor": {"ulysses_sequence_parallel_size": 2}}
    values = {"algorithm": {"adv_estimator": "gae"}, "actor_rollout_ref": sizes}
    steps = train(shared, values | {"critic": {"ulysses_sequence_parallel_size": 2}}, "ulysses")
    assert_trained(steps)
    assert all(step["training/rollout_probs_diff_max"] <= 1e-4 for step in steps)


@contextmanager
def one_step(shared: Shared, values: Mapping[str, Any], path: Path) -> Iterator[tuple[Config, RunFolder, Outputs]]:
    """Yield settings, folder and outputs of a run of one step."""
    config = fill(shared.run.config, values)
    with RunFolder.open(path, "") as folder, Tracker(folder, config, total_steps=1) as tracker:
        yield config, folder, outputs_of(config, folder, tracker, "rollouts")


def lines_of(folder: RunFolder) -> list[dict[str, float]]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def test_what_a_step_gave_is_on_disk_before_what_may_fail(shared: Shared, root: Path) -> None:
    """A step is logged before its evaluation, and both before a save; here it fails. Another save is whole."""
    contents = {"checkpoint": {"save_contents": ["model", "optimizer", "extra", "hf_model"]}}
    control = {"type": "adaptive", "kl_coef": 0.5, "target_kl": 0.1, "horizon": 100}
    values = {
        "algorithm": {"adv_estimator": "gae", "use_kl_in_reward": True, "kl_ctrl": control},
        "actor_rollout_ref": {"actor": contents},
        "critic": contents,
    }
    seen: list[dict[str, float]] = []
    with one_step(shared, values, root / "save_fails") as (config, folder, outputs):

        def look(_samples: Sequence[Sample], _step: int) -> None:
            seen.extend(lines_of(folder))
            folder.checkpoints.write_text("")  # a file where the folder would be

        evaluation = replace(outputs.evaluation, prompts=shared.run.data.validation, show=look)
        trainer = new_trainer(shared, config, replace(outputs, evaluation=evaluation), 1)
        with pytest.raises(NotADirectoryError):
            trainer.fit()
        (line,) = lines_of(folder)
        assert seen == [{name: line[name] for name in seen[0]}]
        assert {"critic/score/mean", "actor/grad_norm", "timing_s/step"} <= seen[0].keys()
        assert any(name.startswith("val-core/") for name in line.keys() - seen[0].keys())
        assert "timing_s/save_checkpoint" not in line

        folder.checkpoints.unlink()
        outputs.checkpoints.save(trainer)
        saved = folder.checkpoints / "global_step_1"
        assert (saved / "actor" / "huggingface" / "tokenizer_config.json").is_file()
        assert (saved / "critic" / "huggingface" / "value_head.safetensors").is_file()
        resumed = new_trainer(shared, config, outputs, 1)
        assert outputs.checkpoints.resume(resumed) == 1
        assert trainer.rewards.controller.beta != 0.5
        assert resumed.rewards.controller == trainer.rewards.controller


def test_a_run_that_gives_up_logs_the_step_that_explains_it(shared: Shared, root: Path) -> None:
    values = {
        "algorithm": {"adv_estimator": "gae"},
        "critic": {"optim": {"lr": 1e36, "lr_warmup_steps": 0}},  # after one update its values are not finite
        "trainer": {"critic_warmup": 1, "max_nonfinite_steps": 1},
    }
    with one_step(shared, values, root / "gives_up") as (config, folder, outputs):
        with pytest.raises(WorkerError, match=r"1 optimizer steps of the critic in a row .* lower critic\.optim\.lr"):
            new_trainer(shared, config, outputs, 1).fit()
        (line,) = lines_of(folder)
        assert (line["critic/skipped_steps"], line["critic/skipped_in_a_row"]) == (1, 1)
        assert "actor/grad_norm" not in line
        assert not folder.checkpoints.exists()
