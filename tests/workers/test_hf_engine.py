"""The Hugging Face engine against transformers' `generate`, against the trainer, and against the engine contract."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.workers import contract
from tests.workers.references import greedy_by_transformers
from tests.workers.rig import Rig, config_of, context_of, drive, opened, prompt, prompts_of
from vrl.protocol.columns import LOSS_MASK
from vrl.protocol.errors import DataError, EngineError
from vrl.protocol.ports import EngineRequest
from vrl.protocol.trajectory import Sampling
from vrl.workers.hf_engine import HfEngine, sample_token

GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen2", "qwen2_5_vl"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def rig(kind: str, tiny_folder: Callable[[str], Path]) -> Iterator[Rig]:
    with opened(config_of(tiny_folder(kind), name="hf")) as rig:
        yield rig


def test_greedy_tokens_are_those_of_transformers(rig: Rig, kind: str, tiny_folder: Callable[[str], Path]) -> None:
    prompts = prompts_of(kind)
    outputs = drive(rig.engine, [rig.request(p.uid, p, GREEDY) for p in prompts])
    expected = greedy_by_transformers(tiny_folder(kind), kind, rig.context.renderer, prompts, GREEDY.max_tokens)
    assert contract.tokens(outputs) == expected


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_trainers(rig: Rig, kind: str, temperature: float) -> None:
    batch = rig.generate(prompts_of(kind), Sampling(temperature=temperature, max_tokens=32, seed=1))
    assert batch is not None
    apart = rig.difference(batch, rig.actor_at(temperature))
    assert int(batch.ragged(LOSS_MASK).values.sum()) > 100
    assert apart.mean <= 1e-6
    assert apart.largest <= 1e-5
    assert apart.nats <= 1e-4
    assert rig.difference(batch, rig.actor_at(1.3)).mean > 1e-2


def test_synced_weights_are_used_at_once(rig: Rig, kind: str) -> None:
    sampling = Sampling(max_tokens=16, seed=2)
    first = rig.generate(prompts_of(kind), sampling)
    assert first is not None
    actor = rig.actor_at(1.0)
    rig.train(first, actor)
    stale = rig.difference(first, actor)
    rig.rollout.sync_weights(actor, 0)
    second = rig.generate(prompts_of(kind), sampling)
    rig.rollout.sync_weights(rig.actor, 0)
    assert second is not None
    apart = rig.difference(second, actor)
    assert apart.mean <= 1e-6
    assert apart.nats <= 1e-4
    assert stale.mean > 100 * apart.mean


def test_running_rows_take_new_weights(rig: Rig, kind: str) -> None:
    contract.running_rows_take_new_weights(rig, prompts_of(kind)[-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: weights.pop("{}.layers.1.self_attn.k_proj.weight"),
            r"unwritten.*layers\.1\.self_attn\.k_proj",
        ),
        (lambda weights: weights.pop("{}.embed_tokens.weight"), r"unwritten.*embed_tokens"),
        (lambda weights: weights.update({"{}.bogus.weight": torch.zeros(2)}), r"bogus\.weight.*does not have"),
        (lambda weights: weights.update({"{}.norm.weight": torch.zeros(7)}), r"norm\.weight.*\(7,\).*\(128,\)"),
    ],
    ids=["missing", "missing tied embedding", "unknown", "shape"],
)
def test_incomplete_weights_are_refused(
    rig: Rig, kind: str, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    body = "model" if kind == "qwen2" else "model.language_model"
    weights = {name.replace(body, "{}", 1): tensor for name, tensor in rig.actor.full_weights()}
    change(weights)
    with pytest.raises(EngineError, match=message):
        rig.engine.load_weights((name.replace("{}", body), tensor) for name, tensor in weights.items())
    written = rig.engine.load_weights(rig.actor.full_weights())
    assert written == len(list(rig.actor.full_weights()))


def test_seeds_decide_tokens(rig: Rig, kind: str) -> None:
    contract.seeds_decide_tokens(rig, prompts_of(kind))


def test_greedy_rows_are_finite(rig: Rig, kind: str) -> None:
    contract.greedy_rows_are_finite(rig, prompts_of(kind))


def test_end_tokens_end_turns(rig: Rig) -> None:
    contract.end_tokens_end_turns(rig, prompt("p", "what is 3 + 4?"))


def test_stop_strings_keep_their_ids(rig: Rig) -> None:
    contract.stop_strings_keep_their_ids(rig, prompt("p", "what is 3 + 4?"))


def test_limits_end_rows(rig: Rig) -> None:
    contract.limits_end_rows(rig, prompts_of("qwen2")[1])


def test_aborted_requests_are_gone(rig: Rig, kind: str) -> None:
    contract.aborted_requests_are_gone(rig, prompts_of(kind)[-1])


def test_sleep_ends_what_runs(rig: Rig, kind: str) -> None:
    contract.sleep_ends_what_runs(rig, prompts_of(kind)[-1])


def test_banned_ids_never_come(rig: Rig, kind: str) -> None:
    if kind == "qwen2":
        assert rig.context.renderer.banned_ids == ()
    else:
        contract.banned_ids_never_come(rig, prompt("p", "what is 3 + 4?"))


@pytest.mark.parametrize("limits", [{"max_num_batched_tokens": 40}, {"max_num_seqs": 2}])
def test_waiting_requests_give_the_same_tokens(
    rig: Rig, kind: str, tiny_folder: Callable[[str], Path], limits: dict[str, int]
) -> None:
    narrow = HfEngine.build(context_of(config_of(tiny_folder(kind), name="hf", **limits)))
    requests = [
        rig.request(f"{p.uid}{seed}", p, Sampling(max_tokens=4, seed=seed, ignore_eos=True))
        for p in prompts_of(kind)
        for seed in range(3)
    ]
    wide = drive(rig.engine, requests, max_steps=4)
    assert contract.tokens(drive(narrow, requests)) == contract.tokens(wide)
    with pytest.raises(TimeoutError, match="unfinished after 4 steps"):
        drive(narrow, requests, max_steps=4)


def test_bad_requests_are_refused(rig: Rig, kind: str) -> None:
    request = rig.request("row", prompts_of(kind)[0], GREEDY)
    rig.engine.add_request(request)
    with pytest.raises(EngineError, match="'row' is running already"):
        rig.engine.add_request(request)
    rig.engine.abort(["row"])
    with pytest.raises(EngineError, match="600 tokens and leaves no room in a context of 512"):
        rig.engine.add_request(replace(request, ids=(5,) * 600))
    with pytest.raises(DataError, match="images"):
        rig.engine.add_request(replace(request, images=(b"x",)))
    assert rig.engine.num_unfinished() == 0
    assert rig.engine.step() == []


def test_a_step_over_32_rows_is_fast(rig: Rig) -> None:
    sampling = Sampling(max_tokens=8, ignore_eos=True)
    requests: list[EngineRequest] = contract.many(rig, prompt("p", "what is 3 + 4?"), sampling, 32)
    begin = time.process_time()
    drive(rig.engine, requests)
    assert (time.process_time() - begin) / 8 < 0.5


PROBS = torch.tensor([0.05, 0.5, 0.15, 0.3])


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (-1, 1.0, [0, 1, 2, 3]),
        (2, 1.0, [1, 3]),
        (1, 1.0, [1]),
        (9, 1.0, [0, 1, 2, 3]),
        (-1, 0.79, [1, 3]),
        (-1, 0.81, [1, 2, 3]),
        (-1, 0.5, [1]),
        (-1, 1e-6, [1]),
        (3, 0.52, [1]),  # 0.5 / 0.95 = 0.526 of what top_k leaves
        (3, 0.54, [1, 3]),
    ],
)
def test_truncated_sampling_keeps_the_likeliest(top_k: int, top_p: float, kept: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(top_k=top_k, top_p=top_p)
    drawn = [sample_token(PROBS.log() + 3.0, sampling, generator) for _ in range(500)]
    assert sorted({token for token, _ in drawn}) == kept
    mass = float(PROBS[kept].sum())
    assert all(math.isclose(log_prob, math.log(float(PROBS[token]) / mass), abs_tol=1e-5) for token, log_prob in drawn)


def test_temperature_shapes_the_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = Counter(sample_token(PROBS.log(), Sampling(temperature=0.5), generator)[0] for _ in range(20_000))
    expected = PROBS.square() / PROBS.square().sum()
    for token, share in enumerate(expected.tolist()):
        deviation = math.sqrt(share * (1 - share) / 20_000)
        assert abs(counts[token] / 20_000 - share) < 5 * deviation


def test_greedy_takes_the_likeliest_with_its_plain_log_prob() -> None:
    token, log_prob = sample_token(PROBS.log(), Sampling(temperature=0.0, top_p=0.1), torch.Generator())
    assert token == 1
    assert log_prob == pytest.approx(math.log(0.5))
