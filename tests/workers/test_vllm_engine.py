"""The vLLM engine against the engine contract, and its weight loading. The numbers are in `test_agreement`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.workers import contract
from tests.workers.rig import Rig, config_of, opened, prompt, prompts_of
from vrl.protocol.errors import DataError, EngineError
from vrl.protocol.trajectory import Sampling

pytestmark = pytest.mark.engine

Weights = dict[str, torch.Tensor]
BODY = "model.language_model"
SHORT = prompt("p", "what is 3 + 4?")


@pytest.fixture(scope="module")
def rig(tiny_folder: Callable[[str], Path]) -> Iterator[Rig]:
    with opened(config_of(tiny_folder("qwen2_5_vl"))) as rig:
        yield rig


def test_seeds_decide_tokens(rig: Rig) -> None:
    contract.seeds_decide_tokens(rig, prompts_of("qwen2_5_vl"))


def test_greedy_rows_are_finite(rig: Rig) -> None:
    contract.greedy_rows_are_finite(rig, prompts_of("qwen2_5_vl"))


def test_banned_ids_never_come(rig: Rig) -> None:
    contract.banned_ids_never_come(rig, SHORT)


def test_end_tokens_end_turns(rig: Rig) -> None:
    contract.end_tokens_end_turns(rig, SHORT)


def test_stop_strings_keep_their_ids(rig: Rig) -> None:
    contract.stop_strings_keep_their_ids(rig, SHORT)


def test_limits_end_rows(rig: Rig) -> None:
    contract.limits_end_rows(rig, prompts_of("qwen2_5_vl")[3])


def test_aborted_requests_are_gone(rig: Rig) -> None:
    contract.aborted_requests_are_gone(rig, prompts_of("qwen2_5_vl")[3])


def test_sleep_ends_what_runs(rig: Rig) -> None:
    contract.sleep_ends_what_runs(rig, prompts_of("qwen2_5_vl")[3])


@pytest.mark.parametrize("number", [1, 3])
def test_running_rows_take_new_weights(rig: Rig, number: int) -> None:
    contract.running_rows_take_new_weights(rig, prompts_of("qwen2_5_vl")[number])


def test_broken_images_are_refused(rig: Rig) -> None:
    request = rig.request("row", prompt("p", "see <image>", [b"no image"]), Sampling())
    with pytest.raises(DataError, match="an image of 8 bytes cannot be read"):
        rig.engine.add_request(request)
    assert rig.engine.num_unfinished() == 0


def _drop(name: str) -> Callable[[Weights], object]:
    return lambda weights: weights.pop(name)


def _put(name: str, value: torch.Tensor) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop(f"{BODY}.layers.1.self_attn.q_proj.weight"), r"layers\.1\.self_attn\.qkv_proj"),
        (_drop(f"{BODY}.layers.1.self_attn.k_proj.weight"), r"layers\.1\.self_attn\.qkv_proj"),
        (_drop(f"{BODY}.layers.0.self_attn.v_proj.bias"), r"layers\.0\.self_attn\.qkv_proj"),
        (_drop(f"{BODY}.layers.0.mlp.up_proj.weight"), r"layers\.0\.mlp\.gate_up_proj"),
        (_drop(f"{BODY}.layers.1.input_layernorm.weight"), r"layers\.1\.input_layernorm"),
        (_drop(f"{BODY}.norm.weight"), r"model\.norm"),
        (_drop(f"{BODY}.embed_tokens.weight"), r"embed_tokens"),
        (_drop("model.visual.blocks.0.attn.qkv.weight"), r"visual\.blocks\.0\.attn\.qkv"),
        (_put(f"{BODY}.layers.0.bogus.weight", torch.zeros(2)), r"bogus"),
        (_put("bogus.weight", torch.zeros(2)), r"bogus"),
        (_put(f"{BODY}.norm.weight", torch.zeros(7)), r"norm\.weight"),
        (_put(f"{BODY}.embed_tokens.weight", torch.zeros(7, 128)), r"embed_tokens\.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_weights_are_refused(rig: Rig, change: Callable[[Weights], object], message: str) -> None:
    """Each error names what is wrong, and a whole set of weights still makes the engine right afterwards."""
    weights = dict(rig.actor.full_weights())
    change(weights)
    with pytest.raises(EngineError, match=message):
        rig.engine.load_weights(iter(weights.items()))
    assert rig.engine.load_weights(rig.actor.full_weights()) == len(list(rig.actor.full_weights()))
    rig.engine.reset_caches()
    batch = rig.generate([SHORT, prompts_of("qwen2_5_vl")[2]], Sampling(max_tokens=8, seed=1))
    assert batch is not None
    assert rig.difference(batch).nats < 1e-4
