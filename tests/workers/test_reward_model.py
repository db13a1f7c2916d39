"""The reward model's scores are transformers' own, on one rank and on two, from ids or from text rendered anew."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.models.reward_folders import build_reward_model, plain_score
from tests.workers.rig import LONG, build_tiny, free_port
from vrl.models.renderer import load_renderer
from vrl.models.tiny import build_tiny_model

pytestmark = pytest.mark.dist

HERE = Path(__file__).parent
ANSWERS = ("red", "7 cells", "the answer is blue, so it is not red")
QUESTIONS = ("what is 3 + 4?", LONG, "which colour has the cell")
MAX_LENGTH = 20


def rows_of(policy: Path) -> list[dict[str, Any]]:
    renderer = load_renderer(policy)
    rows: list[dict[str, Any]] = []
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        messages = [{"role": "user", "content": question}]
        ids = renderer.render(messages) + renderer.answer_ids(answer)
        rows.append({"ids": ids, "messages": messages, "answer": answer})
    return rows


def rendered_by_transformers(folder: Path, row: dict[str, Any]) -> list[int]:
    whole = [*row["messages"], {"role": "assistant", "content": row["answer"]}]
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(whole, tokenize=False)
    return AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]


def run(world: int, given: Path, out: Path) -> list[list[tuple[float, int]]]:
    shared = os.environ | {
        "WORLD_SIZE": str(world),
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": str(HERE.parents[1]),
    }
    script = [sys.executable, str(HERE / "reward_rank.py"), str(given), str(out)]
    processes = [subprocess.Popen(script, env=shared | {"RANK": str(rank)}) for rank in range(world)]
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world
    return json.loads(out.read_text())


@pytest.mark.parametrize("world", [1, 2])
def test_scores_are_those_of_transformers_on_any_number_of_ranks(world: int, tmp_path: Path) -> None:
    policy = build_tiny("qwen2", tmp_path)
    same = build_reward_model(policy, tmp_path / "same", seed=4)
    texts = ["wholly other words", "of another tokenizer", "und noch mehr Wörter in einer anderen Sprache"]
    other = build_reward_model(build_tiny_model("qwen2", tmp_path / "o", texts, seed=7), tmp_path / "other", seed=5)
    rows = rows_of(policy)
    ids = [row["ids"] for row in rows]
    rendered = [rendered_by_transformers(other, row) for row in rows]
    assert rendered != ids
    plain = [plain_score(same, row) for row in ids]
    anew = [plain_score(other, row) for row in rendered]
    cases: list[tuple[dict[str, Any], list[float], list[int]]] = [
        ({"model": {"path": str(same)}}, plain, [0, 0, 0]),
        ({"model": {"path": str(other), "input_tokenizer": str(policy)}}, anew, [0, 0, 0]),
        (
            {"model": {"path": str(same)}, "max_length": MAX_LENGTH, "forward_max_token_len_per_gpu": 30},
            [plain_score(same, row[-MAX_LENGTH:]) for row in ids],
            [max(0, len(row) - MAX_LENGTH) for row in ids],
        ),
        ({"model": {"path": str(same)}, "rows": 1}, plain[:1], [0]),  # a rank without a row
    ]
    if world == 2:
        cases.append(({"model": {"path": str(same)}, "ulysses_sequence_parallel_size": 2}, plain, [0, 0, 0]))
    given, out = tmp_path / "given.json", tmp_path / "scores.json"
    given.write_text(json.dumps({"policy": str(policy), "rows": rows, "cases": [case for case, _, _ in cases]}))
    for found, (case, scores, cut) in zip(run(world, given, out), cases, strict=True):
        assert [number for number, _ in found] == pytest.approx(scores, rel=1e-5, abs=1e-5), case
        assert [tokens for _, tokens in found] == cut, case
    assert max(plain) - min(plain) > 0.1  # there was something to tell apart
    assert any(cases[2][2])
