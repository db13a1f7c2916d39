"""What every engine behind the port does; `test_hf_engine` and `test_vllm_engine` run it with theirs."""

from dataclasses import replace

import numpy as np

from tests.workers.rig import Rig, drive
from vrl.protocol.columns import INPUT_IDS, LOSS_MASK, ROLLOUT_LOG_PROBS, SAMPLE_INDEX
from vrl.protocol.ports import EngineOutput, EngineRequest
from vrl.protocol.ragged import Ragged
from vrl.protocol.trajectory import Prompt, Sampling

FREE = Sampling(temperature=2.0, max_tokens=32, ignore_eos=True)


def tokens(outputs: dict[str, EngineOutput]) -> dict[str, tuple[int, ...]]:
    return {name: output.ids for name, output in outputs.items()}


def many(rig: Rig, prompt: Prompt, sampling: Sampling, count: int) -> list[EngineRequest]:
    """Return requests of one prompt with the seeds 0, 1, 2, ..."""
    return [rig.request(f"seed{seed}", prompt, replace(sampling, seed=seed)) for seed in range(count)]


def seeds_decide_tokens(rig: Rig, prompts: list[Prompt]) -> None:
    requests = [
        rig.request(f"{prompt.uid}{seed}", prompt, replace(FREE, max_tokens=12 + seed, seed=seed))
        for seed in range(3)
        for prompt in prompts
    ]
    together = drive(rig.engine, requests)
    backwards = drive(rig.engine, requests[::-1])
    alone: dict[str, EngineOutput] = {}
    for request in requests:
        alone |= drive(rig.engine, [request])
    assert tokens(together) == tokens(backwards) == tokens(alone)
    assert len(set(tokens(together).values())) == len(requests), "other seeds must give other tokens"


def greedy_rows_are_finite(rig: Rig, prompts: list[Prompt]) -> None:
    """Rows of an evaluation: temperature 0 divides nothing, and every number of a row is one."""
    batch = rig.generate(prompts, Sampling(temperature=0.0, max_tokens=8), n=2)
    assert batch is not None
    for name, column in batch.columns.items():
        values = column.values if isinstance(column, Ragged) else column
        assert bool(values.double().isfinite().all()), name
    sampled = batch.ragged(ROLLOUT_LOG_PROBS).values[batch.ragged(LOSS_MASK).values]
    assert len(sampled) > len(prompts)
    assert bool((sampled <= 0).all())
    assert bool(batch.ragged(ROLLOUT_LOG_PROBS).values.any())
    first, second = batch.rows(batch.dense(SAMPLE_INDEX) == 0), batch.rows(batch.dense(SAMPLE_INDEX) == 1)
    assert first.ragged(INPUT_IDS).values.tolist() == second.ragged(INPUT_IDS).values.tolist()


def banned_ids_never_come(rig: Rig, prompt: Prompt) -> None:
    """Some 2,000 tokens of a vocabulary of some 300: each id would come several times."""
    banned = set(rig.context.renderer.banned_ids)
    sampled = [token for output in drive(rig.engine, many(rig, prompt, FREE, 64)).values() for token in output.ids]
    assert banned
    assert not banned & set(sampled)
    neighbours = {min(banned) - 1, max(banned) + 1} | set(rig.context.renderer.eos_ids)
    assert neighbours & set(sampled), "so few tokens were seen that the ban is not tested"


def end_tokens_end_turns(rig: Rig, prompt: Prompt) -> None:
    ends = set(rig.context.renderer.eos_ids)
    free = drive(rig.engine, many(rig, prompt, FREE, 32))
    stopped = drive(rig.engine, many(rig, prompt, replace(FREE, ignore_eos=False), 32))
    assert {output.finish_reason for output in free.values()} == {"length"}
    assert {output.finish_reason for output in stopped.values()} == {"length", "stop"}
    for name, output in stopped.items():
        whole = free[name].ids
        cut = next((place + 1 for place, token in enumerate(whole) if token in ends), len(whole))
        assert output.ids == whole[:cut]
        assert output.finish_reason == ("stop" if whole[cut - 1] in ends else "length")
        assert len(output.log_probs) == cut


def stop_strings_keep_their_ids(rig: Rig, prompt: Prompt) -> None:
    """Ids stay as sampled, with those that completed the string, and the whole string is found in their text."""
    decode = rig.context.renderer.decode
    request = many(rig, prompt, FREE, 1)[0]
    whole = drive(rig.engine, [request])["seed0"].ids
    stop = decode(whole[8:11])
    stopping = replace(request, sampling=replace(request.sampling, stop=(stop, "never said")))
    output = drive(rig.engine, [stopping])["seed0"]
    expected = next(cut for cut in range(1, len(whole) + 1) if stop in decode(whole[:cut]))
    assert len(stop.strip()) > 0
    assert output.ids == whole[:expected]
    assert len(output.log_probs) == expected < len(whole)
    assert output.finish_reason == "stop"


def limits_end_rows(rig: Rig, prompt: Prompt) -> None:
    """A row ends with its limit, and with the context when that is shorter."""
    context = rig.context.config.max_model_len
    request = many(rig, prompt, replace(FREE, max_tokens=3), 1)[0]
    room = context - len(rig.context.renderer.expand(request.ids, request.images))
    endless = replace(request, request_id="endless", sampling=replace(FREE, max_tokens=context))
    outputs = drive(rig.engine, [request, endless])
    assert len(outputs["seed0"].ids) == 3
    assert len(outputs["endless"].ids) == room
    assert {output.finish_reason for output in outputs.values()} == {"length"}


def aborted_requests_are_gone(rig: Rig, prompt: Prompt) -> None:
    requests = many(rig, prompt, FREE, 4)
    expected = tokens(drive(rig.engine, requests))
    for request in requests:
        rig.engine.add_request(request)
    for _ in range(5):
        assert not rig.engine.step()
    rig.engine.abort(["seed1", "seed3", "never added"])
    assert rig.engine.num_unfinished() == 2
    left = tokens(drive(rig.engine, []))
    assert left == {name: expected[name] for name in ("seed0", "seed2")}
    assert tokens(drive(rig.engine, requests[1:2])) == {"seed1": expected["seed1"]}, "an aborted name is free again"


def sleep_ends_what_runs(rig: Rig, prompt: Prompt) -> None:
    """A loop over an engine that was put to sleep ends, and after the wake the same tokens come."""
    requests = many(rig, prompt, FREE, 4)
    expected = tokens(drive(rig.engine, requests))
    for request in requests:
        rig.engine.add_request(request)
    rig.engine.step()
    rig.engine.sleep()
    assert rig.engine.num_unfinished() == 0
    assert drive(rig.engine, [], max_steps=1) == {}
    rig.engine.wake(["weights"])
    rig.engine.wake(["kv_cache"])
    assert tokens(drive(rig.engine, requests)) == expected


def running_rows_take_new_weights(rig: Rig, prompt: Prompt) -> None:
    """Half a row under old weights, half under new ones: the second is that of a fresh row with the same prefix."""
    greedy = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
    request = rig.request("row", prompt, greedy)
    initial = dict(rig.actor.full_weights())
    changed = {name: tensor * 1.1 for name, tensor in initial.items()}

    def halves(reset: bool) -> EngineOutput:
        rig.engine.load_weights(iter(initial.items()))
        rig.engine.reset_caches()
        rig.engine.add_request(request)
        for _ in range(6):
            assert not rig.engine.step()
        rig.engine.load_weights(iter(changed.items()))
        if reset:
            rig.engine.reset_caches()
        return drive(rig.engine, [])["row"]

    whole = halves(reset=True)
    prefix = replace(request, ids=request.ids + whole.ids[:6], sampling=replace(greedy, max_tokens=6))
    fresh = drive(rig.engine, [prefix])["row"]
    assert fresh.ids == whole.ids[6:]
    assert np.allclose(fresh.log_probs, whole.log_probs[6:], atol=1e-4)
    stale = halves(reset=False)
    assert not np.allclose(stale.log_probs[6:], whole.log_probs[6:], atol=1e-2)
    rig.engine.load_weights(iter(initial.items()))
    rig.engine.reset_caches()
