"""Engine and trainer compute the same numbers: before and after weight syncs, on one rank and on two.

Float32 on a CPU: mean difference of probabilities at most 1e-5, maximum 1e-4. Controls show that the checks notice.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tests.workers.contract import tokens
from tests.workers.references import greedy_by_transformers
from tests.workers.rig import Difference, Rig, config_of, drive, free_port, opened, prompts_of
from tests.workers.turns import KIND, acting_rows, with_tools
from vrl.agent.environments.pool import EnvironmentPool
from vrl.agent.environments.wire import EnvironmentSpec, KindSpec
from vrl.protocol.columns import IMAGE_KEYS, INPUT_IDS, LOSS_MASK, PROMPT_LENGTH, ROW_ID, TURN_IDS
from vrl.protocol.trajectory import Sampling
from vrl.workers.hf_engine import HfEngine
from vrl.workers.process import environment

pytestmark = pytest.mark.engine

GREEDY: Final = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
FREE: Final = Sampling(max_tokens=16, seed=1)
ROOT: Final = Path(__file__).parents[2]
BLOCK: Final = 128  # tokens the prefix cache shares at a time


def agrees(apart: Difference) -> bool:
    return apart.mean <= 1e-5 and apart.largest <= 1e-4


def is_far(apart: Difference, base: Difference) -> bool:
    return apart.mean >= 100 * base.mean and not agrees(apart)


@pytest.fixture(scope="module", params=["qwen2", "qwen2_5_vl"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def rig(kind: str, tiny_folder: Callable[[str], Path]) -> Iterator[Rig]:
    with opened(config_of(tiny_folder(kind), limit_images=4, max_model_len=1024)) as rig:
        yield rig


def measure(rig: Rig, kind: str, **actor: Any) -> Difference:
    """Generate the same rows as ever with the engine as it is, and compare."""
    batch = rig.generate(prompts_of(kind), FREE)
    assert batch is not None
    return rig.difference(batch, **actor)


def test_greedy_tokens_agree(rig: Rig, kind: str, tiny_folder: Callable[[str], Path]) -> None:
    prompts = prompts_of(kind)
    requests = [rig.request(prompt.uid, prompt, GREEDY) for prompt in prompts]
    ours = tokens(drive(rig.engine, requests))
    assert ours == tokens(drive(HfEngine.build(rig.context), requests))
    assert ours == greedy_by_transformers(tiny_folder(kind), kind, rig.context.renderer, prompts, GREEDY.max_tokens)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_agree(rig: Rig, kind: str, temperature: float) -> None:
    batch = rig.generate(prompts_of(kind), Sampling(temperature=temperature, max_tokens=48, seed=2), n=8)
    assert batch is not None
    mask = batch.ragged(LOSS_MASK).values
    banned = set(rig.context.renderer.banned_ids)
    apart = rig.difference(batch, rig.actor_at(temperature))
    assert int(mask.sum()) > 200
    assert not banned & set(batch.ragged(INPUT_IDS).values[mask].tolist())
    assert agrees(apart)
    assert is_far(rig.difference(batch, rig.actor_at(0.85)), apart)


def test_rows_of_several_turns_agree(rig: Rig, kind: str) -> None:
    """Tools bring images and long texts, turns end by themselves and on a stop string: every sampled token agrees."""
    with EnvironmentPool(1, EnvironmentSpec(kinds={"scripted": KindSpec(factory=KIND)})) as pool:
        acting, engine = with_tools(rig, pool)
        batch = acting.generate(acting_rows(kind), Sampling(max_tokens=16, seed=4, stop=("e", "a")), n=4)
    assert batch is not None
    images = {row: len(keys) for row, keys in zip(batch.objects[ROW_ID], batch.objects[IMAGE_KEYS], strict=True)}
    assert images == ({"text": 0, "one": 3, "none": 2} if kind == "qwen2_5_vl" else {"text": 0})
    assert {int(turns.max()) for turns in batch.ragged(TURN_IDS).to_rows()} == {2}
    sampled = sum(len(output.ids) for output in engine.outputs.values())
    assert int(batch.ragged(LOSS_MASK).values.sum()) == sampled > 100
    ends = {output.ids[-1] in rig.context.renderer.eos_ids for output in engine.outputs.values()}
    assert False in ends
    assert agrees(rig.difference(batch))


def test_an_update_and_a_sync_keep_the_agreement(rig: Rig, kind: str) -> None:
    """Prompts of more than a block repeat, so that a prefix, and an image, of older weights would be found again."""
    actor = rig.actor_at(1.0)
    rig.rollout.sync_weights(actor, 0)
    batch = rig.generate(prompts_of(kind), FREE)
    assert batch is not None
    assert int(batch.dense(PROMPT_LENGTH).max()) > BLOCK
    before = rig.difference(batch, actor)
    assert agrees(before)

    rig.train(batch, actor)
    assert is_far(measure(rig, kind, actor=actor), before), "a sync that is left out is noticed"

    rig.engine.load_weights(actor.full_weights())
    assert is_far(measure(rig, kind, actor=actor), before), "caches of older weights are noticed"

    rig.rollout.sync_weights(actor, 0)
    assert agrees(measure(rig, kind, actor=actor))
    rig.rollout.sync_weights(rig.actor, 0)
    assert agrees(measure(rig, kind)), "weights go back and forth"


CHANGED: Final = {
    "qwen2": ["model.layers.1.post_attention_layernorm.weight", "model.norm.weight", "model.embed_tokens.weight"],
    "qwen2_5_vl": ["language_model.model.norm.weight", "visual.blocks.1.norm1.weight"],
}
# Linear layers, which the engine repacks, by the names that a sync uses.
CHANGED_IN_A_SYNC: Final = {
    "qwen2": ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"],
    "qwen2_5_vl": ["model.language_model.layers.1.self_attn.v_proj.weight", "model.visual.blocks.1.attn.qkv.weight"],
}


def test_one_changed_parameter_is_noticed(rig: Rig, kind: str) -> None:
    base = measure(rig, kind)
    for name in CHANGED[kind]:
        parameter = next(p for found, p in rig.engine.parameters() if found == name)
        with torch.no_grad():
            parameter *= 1.02
        rig.engine.reset_caches()
        assert is_far(measure(rig, kind), base), name
        rig.rollout.sync_weights(rig.actor, 0)
        assert agrees(measure(rig, kind)), name


def test_one_weight_lost_in_a_sync_is_noticed(rig: Rig, kind: str) -> None:
    base = measure(rig, kind)
    weights = dict(rig.actor.full_weights())
    for name in CHANGED_IN_A_SYNC[kind]:
        rig.engine.load_weights(iter((weights | {name: weights[name] * 0.9}).items()))
        rig.engine.reset_caches()
        assert is_far(measure(rig, kind), base), name
        rig.rollout.sync_weights(rig.actor, 0)
        assert agrees(measure(rig, kind)), name


@pytest.fixture(scope="module")
def ranks(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run two ranks; return what each saw, by its engine's ranks."""
    folder, out = tiny_folder("qwen2_5_vl"), tmp_path_factory.mktemp("ranks")
    ports = f"{free_port()},{free_port()}"
    errors = [out / f"{rank}.err" for rank in range(2)]
    started = []
    for rank, error in enumerate(errors):
        command = [
            sys.executable,
            "-m",
            "tests.workers.rank_agreement",
            str(rank),
            ports,
            str(folder),
            str(out / f"{rank}"),
        ]
        with error.open("w") as file:
            variables = os.environ | environment("cpu", 1)
            started.append(subprocess.Popen(command, env=variables, cwd=ROOT, stderr=file))
    try:
        codes = [rank.wait(timeout=600) for rank in started]
    finally:
        for rank in started:
            rank.kill()
    written = [error.read_text() for error in errors]
    assert codes == [0, 0], "\n".join(written)
    assert not any("Traceback" in text for text in written), "\n".join(written)
    return [json.loads((out / f"{rank}").read_text()) for rank in range(2)]


@pytest.mark.dist
@pytest.mark.parametrize("tensor_parallel", ["1", "2"])
def test_two_ranks_agree(ranks: list[dict[str, Any]], tensor_parallel: str) -> None:
    for seen in (rank[tensor_parallel] for rank in ranks):
        before, unsynced, after = (Difference(*seen[name]) for name in ("before", "unsynced", "after"))
        assert seen["rows"] == 8
        assert seen["turns"][0] > 60, "tokens of rows with tools, in step on both ranks"
        assert agrees(Difference(*seen["turns"][1]))
        assert seen["compiled"] == 0, "the engine started a compiler"
        assert agrees(before)
        assert agrees(after)
        assert is_far(unsynced, before)
        assert seen["version"] == 1
    first, second = (rank[tensor_parallel] for rank in ranks)
    assert first["grad_norm"] == second["grad_norm"] > 0


@pytest.mark.dist
def test_tensor_parallel_ranks_return_the_same_tokens(
    ranks: list[dict[str, Any]], tiny_folder: Callable[[str], Path]
) -> None:
    first, second = ranks
    assert first["2"]["sampled"] == second["2"]["sampled"]
    assert first["2"]["greedy"] == second["2"]["greedy"] == first["1"]["greedy"] == second["1"]["greedy"]
