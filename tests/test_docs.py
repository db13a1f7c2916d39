"""Every command in README.md and docs/ is run: as it stands where it is quick, shortened by settings where it trains.

A command is a line of a `bash` block, or code in a line, that begins with `bash` or `.venv/bin/`. One that no rule here
knows how to run fails the first test.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from vrl.controller.cli import main

ROOT: Final = Path(__file__).resolve().parents[1]
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
SHORT: Final = (
    "warm_start.steps=40",
    "warm_start.batch_size=32",
    "warm_start.stop_probability=null",
    "trainer.total_training_steps=2",
    "trainer.default_local_dir=RUN",
    "data.val_max_samples=8",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
)
TRAIN: Final = "bash train_ppo.sh"
MEASURE_MEMORY: Final = ".venv/bin/python benchmarks/run_memory.py -- "


def commands() -> list[str]:
    found: list[str] = []
    for page in PAGES:
        text = page.read_text()
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            found += [line.split("  #")[0].strip() for line in block.splitlines() if line.strip()]
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        found += [" ".join(code.split()) for code in re.findall(r"`((?:bash|\.venv/bin/)[^`]*)`", text)]
    return list(dict.fromkeys(found))


KNOWN: Final = {
    "bash tests/run.sh",
    ".venv/bin/vrl data gsm8k OUT --input FILES",
    ".venv/bin/python benchmarks/curves.py OUT.png RUN/metrics.jsonl",
    ".venv/bin/python benchmarks/run_shares.py RUN/metrics.jsonl",
    ".venv/bin/python benchmarks/generation.py",
    ".venv/bin/python benchmarks/training.py",
    ".venv/bin/python benchmarks/sandbox.py",
    ".venv/bin/python benchmarks/peers.py",  # its own side in tests/test_peers.py; the peers take 10 GB and minutes
    "VRL_WRITE_TABLES=1 .venv/bin/python -m pytest tests/workers/test_learner.py",  # a test of the tier dist
}


def test_all_commands_are_known() -> None:
    assert TRAIN in commands()
    others = {command.removeprefix(MEASURE_MEMORY) for command in commands()}
    others = {command for command in others if command != TRAIN and not command.startswith(f"{TRAIN} ")}
    assert others <= KNOWN


@pytest.mark.parametrize("command", [c.removeprefix(MEASURE_MEMORY) for c in commands() if TRAIN in c])
def test_settings_in_the_docs_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [word for word in shlex.split(command.removeprefix(TRAIN)) if word not in ("--cfg", "job")]
    assert main(["train", *settings, "--cfg", "job"]) == 0
    assert "adv_estimator" in capsys.readouterr().out


def test_the_test_command() -> None:
    done = run("bash tests/run.sh --tier format", ROOT)
    assert "format" in done


def test_converting_data(tmp_path: Path) -> None:
    question = {"question": "What is 3 + 4?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
    (tmp_path / "train.jsonl").write_text(json.dumps(question) + "\n")
    run(f"{ROOT}/.venv/bin/vrl data gsm8k {tmp_path / 'out'} --input {tmp_path / 'train.jsonl'}", tmp_path)
    assert (tmp_path / "out" / "train.parquet").is_file()


@pytest.mark.dist
def test_the_benchmark_of_training(tmp_path: Path) -> None:
    printed = run(f"{sys.executable} {ROOT}/benchmarks/training.py 2 sequence advantages", tmp_path)
    assert len(re.findall(r"= (\d+\.\d+)", printed)) == 4  # activations, three estimators
    assert "sequence parallel 2 / 1" in printed
    tokens, words, width, chunk = 4096, 32000, 64, 512
    peak = run(
        f"{sys.executable} {ROOT}/benchmarks/training.py --inner peak chunked {tokens} {words} {width} {chunk}", ROOT
    )
    assert float(peak) <= (2 * tokens * width + 3 * chunk * words + words * width) * 4 / 2**20


@pytest.mark.ray
def test_training_measuring_and_drawing(tmp_path: Path) -> None:
    printed = run(
        f"{sys.executable} {ROOT}/benchmarks/run_memory.py -- bash {ROOT}/train_ppo.sh {' '.join(SHORT)}", tmp_path
    )
    assert re.search(r"step +2/2 ", printed)
    assert re.search(r"peak \d+ MiB", printed)
    assert (tmp_path / "RUN" / "config.yaml").is_file()
    assert_an_agent_at_work(tmp_path / "RUN")
    run(f"{sys.executable} {ROOT}/benchmarks/curves.py OUT.png RUN/metrics.jsonl", tmp_path)
    assert (tmp_path / "OUT.png").read_bytes().startswith(b"\x89PNG")
    shares = run(f"{sys.executable} {ROOT}/benchmarks/run_shares.py RUN/metrics.jsonl", tmp_path)
    assert "engine + learner" in shares
    ratio = run(f"{sys.executable} {ROOT}/benchmarks/generation.py 2", tmp_path)
    assert "rollout / bare engine" in ratio

    for name in ("rloo", "gae"):  # two more names through the same command, from the same warm start
        settings = f"trainer.default_local_dir=RUN_{name} trainer.total_training_steps=1 algorithm.adv_estimator={name}"
        quiet = "trainer.test_freq=-1 trainer.val_before_train=False trainer.save_freq=-1"
        run(f"bash {ROOT}/train_ppo.sh {' '.join(SHORT)} {settings} {quiet}", tmp_path)
        (line,) = (tmp_path / f"RUN_{name}" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line)["actor/grad_norm"] > 0


def assert_an_agent_at_work(folder: Path) -> None:
    """Look at a short run of the default: tools were called, engine and learner agree on rows with observations."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "training/rollout_probs_diff_max" in line]
    assert len(steps) == 2
    for step in steps:
        assert step["training/failed_rows"] == 0
        assert step["num_turns/max"] >= 2
        assert step["training/rollout_probs_diff_max"] <= 1e-4
    written = [line for step in (1, 2) for line in (folder / f"rollouts/step_{step}.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in written if "<tool_response>" in line]
    for row in rows:
        assert row["sampled_tokens"] < row["response_length"]
        assert len(row["turn_rewards"]) >= 2
    if shutil.which("bwrap"):
        assert any(row["data_source"] == "tiny/code" for row in rows)
    assert any(len(row["images"]) == 2 for row in rows if row["data_source"] == "tiny/zoom")


def run(command: str, folder: Path) -> str:
    done = subprocess.run(shlex.split(command), cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
