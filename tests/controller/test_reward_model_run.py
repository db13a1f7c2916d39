"""A run with a reward model as the only reward, on a pool of its own, until its process is killed."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from transformers import AutoTokenizer

from tests.models.reward_folders import build_reward_model, plain_score
from vrl.data.tiny_tasks import tokenizer_texts
from vrl.models.tiny import build_tiny_model

pytestmark = pytest.mark.ray

QUESTIONS = ("what is 3 + 4?", "which colour has the cell?", "count the blue cells", "and the red ones?")


def write_inputs(root: Path) -> None:
    """Write a policy, a reward model with another tokenizer, and rows that no reward function knows."""
    build_tiny_model("qwen2", root / "policy", tokenizer_texts(), seed=3)
    like = build_tiny_model("qwen2", root / "like", ["wholly other words", "of another tokenizer"], seed=7)
    build_reward_model(like, root / "reward", seed=5)
    rows = [
        {
            "data_source": "known/to/nobody",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "model"},
            "extra_info": {"index": number},
        }
        for number, question in enumerate(QUESTIONS)
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


SETTINGS = (
    "trainer.default_local_dir=run",
    "prepare.model=null",
    "prepare.data=null",
    "warm_start.enable=False",
    "actor_rollout_ref.model.path=policy",
    "data.train_files=[rows.jsonl]",
    "data.val_files=[]",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "trainer.n_gpus_per_node=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "trainer.total_training_steps=10000",
    "trainer.logger=[console]",
    "reward_model.enable=True",
    "reward_model.model.path=reward",
    "reward_model.model.input_tokenizer=policy",
    "reward_model.enable_resource_pool=True",
    "reward_model.weight=0.5",
    "reward_model.rule_weight=0.0",
)


def runs_no_engine(process: psutil.Process) -> bool:
    return not any("vllm" in region.path for region in process.memory_maps())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """Run until step 2 is over, kill the reward model; return the folder, what was said and who was killed."""
    root = tmp_path_factory.mktemp("reward")
    write_inputs(root)
    command = [sys.executable, "-m", "vrl.controller.cli", "train", "--config-name", "tiny_vl_grpo", *SETTINGS]
    process = subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        seen = False
        for line in process.stdout:
            if seen := bool(re.match(r"step +2/", line)):
                break
        assert seen, process.communicate(timeout=60)[1]
        children = psutil.Process(process.pid).children(recursive=True)
        workers = [child for child in children if "WorkerHost" in " ".join(child.cmdline())]
        assert len(workers) == 2
        (reward_model,) = [worker for worker in workers if runs_no_engine(worker)]
        reward_model.send_signal(signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode not in (0, None)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return root, stderr, reward_model.pid


def test_rows_get_the_reward_models_score_and_nothing_else(killed: tuple[Path, str, int]) -> None:
    root = killed[0]
    rows = [json.loads(line) for line in (root / "run" / "rollouts" / "step_1.jsonl").read_text().splitlines()]
    assert len(rows) == 16
    tokenizer = AutoTokenizer.from_pretrained(root / "reward")
    question = dict(enumerate(QUESTIONS))
    for row in rows[::5]:
        (content,) = [text for text in question.values() if text in row["prompt_text"]]
        whole = [{"role": "user", "content": content}, {"role": "assistant", "content": row["response_text"]}]
        ids = tokenizer(tokenizer.apply_chat_template(whole, tokenize=False), add_special_tokens=False)["input_ids"]
        assert row["score_extra"]["rm_score"] == pytest.approx(plain_score(root / "reward", ids), rel=1e-5, abs=1e-5)
    scores = [row["score_extra"]["rm_score"] for row in rows]
    assert [row["score"] for row in rows] == pytest.approx([0.5 * score for score in scores], rel=1e-6)
    assert {row["score_extra"]["rule_score"] for row in rows} == {0.0}
    step = json.loads((root / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert step["reward_model/score/mean"] == pytest.approx(statistics.fmean(scores), rel=1e-5)
    assert step["critic/score/mean"] == pytest.approx(0.5 * statistics.fmean(scores), rel=1e-5)
    assert step["reward_model/rule_score/max"] == 0
    assert step["reward_model/truncated_rows"] == 0
    assert step["training/failed_rows"] == 0
    assert step["actor/grad_norm"] > 0


def test_a_death_in_another_pool_ends_the_run_with_its_name(killed: tuple[Path, str, int]) -> None:
    _, stderr, pid = killed
    assert "in pool reward_model the process of rank 0 died" in stderr
    assert f"pid: {pid}\n" in stderr
