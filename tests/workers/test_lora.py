"""Actor and critic that learn through adapters: one rank and two alike; reference, merged weights, files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.workers.lora_process import KINDS, main
from tests.workers.rig import build_tiny, free_port
from vrl.workers.process import environment

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Run two ranks, then one in this process; return what each world saw, by its size and the kind of model."""
    root = tmp_path_factory.mktemp("lora")
    for kind in KINDS:
        build_tiny(kind, root)
    command, port = [sys.executable, "-m", "tests.workers.lora_process"], str(free_port())
    variables = os.environ | environment("cpu", 1)
    ranks = [
        subprocess.Popen([*command, str(rank), "2", port, str(root)], env=variables, cwd=ROOT) for rank in range(2)
    ]
    try:
        codes = [rank.wait(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0]
    before = dict(os.environ)
    try:
        main(0, 1, free_port(), root)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return {world: json.loads((root / f"seen_{world}.json").read_text()) for world in (1, 2)}


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_and_two_learn_alike(seen: dict[int, dict[str, Any]], kind: str) -> None:
    one, two = seen[1][kind], seen[2][kind]
    for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm"):
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert two["supervised"] == pytest.approx(one["supervised"], rel=1e-3)
    for world in (one, two):
        assert min(*world["actor/grad_norm"], *world["critic/grad_norm"]) > 1e-3
        assert world["supervised"][-1] < 0.8 * world["supervised"][0]
        assert world["critic/vf_loss"][-1] < world["critic/vf_loss"][0]


def test_ranks_that_share_sequences_learn_alike(seen: dict[int, dict[str, Any]]) -> None:
    one, shared = seen[1]["qwen2_5_vl"], seen[2]["qwen2_5_vl"]["shared"]
    for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm"):
        assert shared[name] == pytest.approx(one[name][0], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_model_without_its_adapter(seen: dict[int, dict[str, Any]], kind: str, world: int) -> None:
    found = seen[world][kind]
    assert found["start"] == 0.0
    assert found["reference_is_the_model"] < 1e-5
    assert found["reference_moved"] == 0.0
    assert found["moved"] > 0.1


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_engines_and_folders_get_the_merged_weights(seen: dict[int, dict[str, Any]], kind: str, world: int) -> None:
    found = seen[world][kind]
    assert found["same_names"]
    assert max(found["merged"], found["exported"], found["exported_adapter"]) < 1e-5
    assert max(found["critic_exported"], found["critic_exported_adapter"]) < 1e-5


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_what_learns(seen: dict[int, dict[str, Any]], kind: str, world: int) -> None:
    found = seen[world][kind]
    assert found["resumed"] == found["critic_resumed"] == 0.0
    assert found["next"][0] == found["next"][1]
    assert seen[1][kind]["resumed_from_two"] < 1e-3  # after ten updates each
    assert found["bytes"] < found["bytes_of_the_model"]


def test_a_checkpoint_does_not_load_over_other_adapters_or_another_model(seen: dict[int, dict[str, Any]]) -> None:
    said = seen[2]["qwen2"]["refusals"]
    assert "LoRA is rank 8 scale 1 on 14 layers here, rank 4 scale 2 on 14 layers there" in said["rank"]
    assert "LoRA is no adapter here" in said["none"]
    assert "the fingerprint of the frozen weights is" in said["model"]
