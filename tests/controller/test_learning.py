"""The default run learns: held-out accuracy on both tiny tasks rises, and it needs the reward for that."""

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vrl.data.tiny_tasks import COLORS

TASKS = ("tiny/visual", "tiny/arithmetic")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learning")


def run(root: Path, name: str, settings: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Train in `root`; return the first and the last evaluation, temperature 1 and greedy, by task."""
    given = [f"trainer.default_local_dir={root / name}", "trainer.logger=[console]", "trainer.test_freq=-1", *settings]
    command = [sys.executable, "-m", "vrl.controller.cli", "train", *given]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "val-core/tiny/visual/reward/mean@1" in line]
    assert [line["training/global_step"] for line in evaluations] == [0, lines[-1]["training/global_step"]]
    return evaluations[0], evaluations[-1]


def accuracy(evaluation: dict[str, float], task: str, kind: str = "mean@1") -> float:
    return evaluation[f"val-core/{task}/reward/{kind}"]


@pytest.mark.learning
def test_the_default_run_learns(root: Path) -> None:
    before, after = run(root, "default", ["trainer.total_training_steps=40"])
    for task in TASKS:
        assert accuracy(before, task) <= 0.65
        assert accuracy(after, task) - accuracy(before, task) >= 0.1
        assert accuracy(after, task, "greedy") - accuracy(before, task, "greedy") >= 0.1


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_three_seeds_reach_nine_of_ten(root: Path, seed: int) -> None:
    before, after = run(root, f"seed{seed}", [f"trainer.seed={seed}"])
    for task in TASKS:
        assert accuracy(before, task) <= 0.6
        assert accuracy(after, task) >= 0.9
        assert accuracy(after, task, "greedy") - accuracy(before, task, "greedy") >= 0.1
    assert abs(accuracy_without_pixels(root, f"seed{seed}") - 1 / len(COLORS)) <= 0.1


def accuracy_without_pixels(root: Path, name: str) -> float:
    """Return the trained model's accuracy on the visual task when every image is one grey."""
    rows = [row for row in pq.read_table(root / "data/tiny/val.parquet").to_pylist() if row["images"]]
    for image in (image for row in rows for image in row["images"]):
        grey = io.BytesIO()
        Image.new("RGB", Image.open(io.BytesIO(image["bytes"])).size, (128, 128, 128)).save(grey, "PNG")
        image["bytes"] = grey.getvalue()
    pq.write_table(pa.Table.from_pylist(rows), root / "grey.parquet")
    (checkpoint,) = (root / name / "checkpoints").iterdir()
    given = [f"trainer.default_local_dir={root / name}_grey", "trainer.resume_mode=resume_path",
             f"trainer.resume_from_path={checkpoint}", "data.val_files=grey.parquet"]  # fmt: skip
    command = [sys.executable, "-m", "vrl.controller.cli", "eval", *given]
    subprocess.run(command, cwd=root, capture_output=True, timeout=600, check=True)
    (line,) = (root / f"{name}_grey" / "metrics.jsonl").read_text().splitlines()
    return json.loads(line)["val-core/tiny/visual/reward/mean@1"]


@pytest.mark.long
def test_ppo_with_a_critic_learns(root: Path) -> None:
    _, after = run(root, "ppo", ["algorithm.adv_estimator=gae"])
    for task in TASKS:
        assert accuracy(after, task) >= 0.85


@pytest.mark.long
@pytest.mark.parametrize("control", ["learning_rate", "shuffled"])
def test_without_a_signal_nothing_is_learned(root: Path, control: str) -> None:
    (root / "shuffled.py").write_text(
        "import random\n\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if extra_info.get('split') == 'val':\n"
        "        return float(solution_str.strip() == ground_truth)\n"
        "    return float(random.random() < 0.5)\n"
    )
    settings = {
        "learning_rate": ["actor_rollout_ref.actor.optim.lr=0"],
        "shuffled": ["custom_reward_function.path=shuffled.py"],
    }
    before, after = run(root, control, settings[control])
    for task in TASKS:
        assert accuracy(after, task) - accuracy(before, task) < 0.05
