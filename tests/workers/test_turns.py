"""The turn loop over the Hugging Face engine with real tool processes: rows, limits, failures, time."""

import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.workers.rig import LONG, Rig, config_of, opened, png, prompt
from tests.workers.turns import Act, Recorder, acting, with_tools
from vrl.agent.environments.pool import EnvironmentPool
from vrl.agent.environments.types import Observation, StepResult
from vrl.agent.environments.wire import EnvironmentSpec, KindSpec, StepOutcome
from vrl.agent.episode import Episode, EpisodeLimits, RenderedPrompt
from vrl.protocol.columns import (
    IMAGE_KEYS,
    INPUT_IDS,
    LOSS_MASK,
    POLICY_VERSIONS,
    PROMPT_LENGTH,
    RESPONSE_TEXT,
    RETRIES,
    ROW_ID,
    SAMPLE_INDEX,
    SCORE_EXTRA,
    STOP_REASON,
    TOKEN_LEVEL_SCORES,
    TURN_IDS,
    TURN_INFO,
    TURN_REWARDS,
)
from vrl.protocol.dataproto import DataProto
from vrl.protocol.ports import EngineOutput
from vrl.protocol.trajectory import Prompt, Sampling, StopReason, request_seed

TURN = Sampling(max_tokens=8, seed=3)
STRICT = replace(TURN, ignore_eos=True)  # a turn has exactly 8 tokens


@pytest.fixture(scope="module")
def rig(tiny_folder: Callable[[str], Path]) -> Iterator[Rig]:
    with opened(config_of(tiny_folder("qwen2_5_vl"), name="hf", max_model_len=1600, limit_images=4)) as rig:
        yield rig


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notes")


@pytest.fixture(scope="module")
def pool(notes: Path) -> Iterator[EnvironmentPool]:
    kind = KindSpec(factory="tests.agent.environments.kinds:Kind", kwargs={"folder": str(notes)})
    with EnvironmentPool(2, EnvironmentSpec(kinds={"scripted": kind})) as pool:
        yield pool


@pytest.fixture
def generate(rig: Rig, pool: EnvironmentPool) -> Callable[..., tuple[DataProto, Recorder]]:
    def generate(
        prompts: list[Prompt], sampling: Sampling = TURN, n: int = 1, **limits: Any
    ) -> tuple[DataProto, Recorder]:
        acting_rig, engine = with_tools(rig, pool, **limits)
        batch = acting_rig.generate(prompts, sampling, n=n)
        assert batch is not None
        order = sorted(range(len(batch)), key=lambda i: (batch.objects[ROW_ID][i], batch.dense(SAMPLE_INDEX)[i]))
        return batch.rows(order), engine

    return generate


def random_script(random: Random, seed: int) -> list[Act]:
    acts: list[Act] = []
    for turn in range(random.randint(1, 4)):
        role = random.choice(["tool", "user"])
        images = [png(28 * random.randint(1, 4), 56, 10 * seed + turn)] * random.choice([0, 0, 1])
        say = [{"role": role, "content": f"see <|im_end|>{turn} " + "<image>" * len(images)}]
        say += [{"role": "tool", "content": "and this"}] * random.choice([0, 1])
        acts.append({"say": say, "images": images, "reward": turn + 1.0, "sleep": random.choice([0, 0.02])})
    return [*acts, {}]


def test_rows_only_grow_and_are_those_of_the_trainer(rig: Rig, generate: Callable[..., Any]) -> None:
    """Random episodes beside plain ones: what the engine gets, what it samples, what is trained on, one row."""
    random = Random(5)
    prompts = [prompt("plain", "what is 3 + 4?"), prompt("plain2", "and <image>", [png(56, 84, 1)])]
    prompts += [
        acting(
            f"r{k}",
            "count <image>" * (k % 2) + LONG * (k % 3 == 0),
            *random_script(random, k),
            images=[png(60, 60, k)] * (k % 2),
        )
        for k in range(6)
    ]
    before = deepcopy(prompts)
    batch, engine = generate(prompts, n=2)
    assert len(batch) == 16
    assert prompts == before, "samples share no state and leave their row as it was"
    renderer = rig.context.renderer
    turns_seen = 0
    for i in range(len(batch)):
        name = f"{batch.objects[ROW_ID][i]}/{batch.dense(SAMPLE_INDEX)[i]}/"
        requests = [request for request in engine.requests if request.request_id.startswith(name)]
        outputs = [engine.outputs[request.request_id] for request in requests]
        for turn, (one, output, two) in enumerate(zip(requests, outputs, requests[1:], strict=False)):
            grown = one.ids + output.ids
            assert two.ids[: len(grown)] == grown, "ids are only ever appended"
            assert two.images[: len(one.images)] == one.images
            assert f"see <|im_end|>{turn} " in renderer.decode(two.ids[len(grown) :], keep_special=True)
        last = requests[-1]
        row = batch.ragged(INPUT_IDS).row(i).tolist()
        assert row == renderer.expand(last.ids + outputs[-1].ids, last.images)
        sampled = [token for output in outputs for token in output.ids]
        mask = batch.ragged(LOSS_MASK).row(i)
        assert batch.ragged(INPUT_IDS).row(i)[mask].tolist() == sampled
        turn_ids = [turn for turn, output in enumerate(outputs) for _ in output.ids]
        assert batch.ragged(TURN_IDS).row(i)[mask].tolist() == turn_ids
        assert batch.ragged(POLICY_VERSIONS).row(i)[mask].unique().tolist() == [rig.rollout.policy_version]
        assert [len(images) for images in [batch.objects[IMAGE_KEYS][i]]] == [len(last.images)]
        assert len({request.sampling.seed for request in requests}) == len(requests)
        if name.startswith("r"):
            rewards = batch.objects[TURN_REWARDS][i]
            assert rewards == (*[turn + 1.0 for turn in range(len(rewards) - 1)], rewards[-1])
            assert float(batch.ragged(TOKEN_LEVEL_SCORES).row(i).sum()) == sum(rewards)
            turns_seen += len(rewards)
    assert turns_seen > 24
    apart = rig.difference(batch)
    assert apart.mean <= 1e-6
    assert apart.largest <= 1e-5
    plain = rig.generate(prompts[:2], TURN, n=2)
    assert plain is not None
    assert plain.ragged(INPUT_IDS).values.tolist() == batch.rows(range(4)).ragged(INPUT_IDS).values.tolist()


def test_states_are_equal_where_the_same_was_seen(rig: Rig) -> None:
    def states(said: tuple[int, ...], seed: int) -> tuple[str, ...]:
        episode = episode_of(rig, acting("row", "look <image>", images=[png(56, 56, 1)]))
        for turn in range(2):
            request = episode.request(STRICT, 0, 0)
            log_probs = (-1.0,) * len(said)
            episode.add_turn(
                EngineOutput(request_id=request.request_id, ids=said, log_probs=log_probs, finish_reason="stop"), 0
            )
            if not turn:
                messages = ({"role": "tool", "content": "<image>"},)
                assert episode.observe(Observation(messages=messages, images=(png(56, 84, seed),))) is None
        return episode.trajectory(StopReason.ANSWER).turn_states

    one, same, other = states((300, 301), 2), states((302, *rig.context.renderer.eos_ids), 2), states((300, 301), 3)
    assert one == same, "what was said in between, and how it ended, is no part of a state"
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert len(one) == 2


def episode_of(rig: Rig, row: Prompt) -> Episode:
    limits = EpisodeLimits(max_response_tokens=900, max_model_len=1600, max_running=1, max_images=2, max_row_images=4)
    return Episode(row, 0, RenderedPrompt.of(row, rig.context.renderer), rig.context.renderer, limits)


def test_cut_turns_are_flagged(rig: Rig) -> None:
    episode = episode_of(rig, acting("row", "look"))
    for reason in ("length", "stop", "length"):
        episode.add_turn(EngineOutput(request_id="row", ids=(300,), log_probs=(-1.0,), finish_reason=reason), 0)
        if episode.turns < 3:
            episode.add_outcome(StepResult(info={"calls": 2}), StepOutcome(run_seconds=0.5, wait_seconds=0.25))
    episode.add_final_reward(1.0)
    info: dict[str, Any] = {"calls": 2, "tool_seconds": 0.5, "queue_seconds": 0.25}
    assert episode.trajectory(StopReason.LENGTH).turn_info == ({**info, "cut": 1}, {**info, "cut": 0}, {"cut": 1})


def test_a_mask_that_picks_other_tokens_is_noticed(rig: Rig) -> None:
    for change in (lambda e: e._mask.__setitem__(0, 1), lambda e: e._expanded.__setitem__(-1, 305)):
        episode = episode_of(rig, acting("row", "look"))
        output = EngineOutput(request_id="row", ids=(300, 301), log_probs=(-1.0, -1.0), finish_reason="stop")
        episode.add_turn(output, 0)
        assert episode.trajectory(StopReason.ANSWER).num_sampled == 2
        change(episode)
        with pytest.raises(ValueError, match=r"turns of \[2\] tokens were sampled"):
            episode.trajectory(StopReason.ANSWER)


def stops(batch: DataProto) -> dict[str, str]:
    return dict(zip(batch.objects[ROW_ID], map(str, batch.objects[STOP_REASON]), strict=True))


def test_why_episodes_end(generate: Callable[..., Any]) -> None:
    tiny, small = png(56, 56, 1), png(56, 84, 2)
    say: Act = {"say": "go on", "reward": 0.5}
    prompts = [
        acting("answers", "hi", say, {"reward": 1.0}),
        acting("done", "hi", say, {"say": "stop here", "done": True}),
        acting("images", "hi <image>", {"say": "<image>" * 3, "images": [small] * 3, "reward": 0.25}, images=[tiny]),
        acting("long", "hi", say, {"say": "word " * 500, "reward": 0.75}),
        acting("talks", "hi", say),
    ]
    batch, engine = generate(prompts, STRICT, max_images=2)
    assert stops(batch) == {
        "answers": "length",  # its turns are cut at 8 tokens
        "done": "env_done",
        "images": "image_limit",
        "long": "context_full",
        "talks": "max_turns",
    }
    masks = batch.ragged(LOSS_MASK)
    assert all(bool(masks.row(i)[-1]) for i in range(len(batch))), "a row ends on a sampled token"
    assert [int(masks.row(i).sum()) for i in range(len(batch))] == [16, 16, 8, 16, 32]
    assert batch.objects[TURN_REWARDS].tolist() == [(0.5, 1.0), (0.5, 0.0), (0.25,), (0.5, 0.75), (0.5,) * 4]
    assert [float(batch.ragged(TOKEN_LEVEL_SCORES).row(i)[-1]) for i in range(5)] == [1.0, 0.0, 0.25, 0.75, 0.5]
    assert all(len(request.images) <= 3 for request in engine.requests)


def test_budgets_of_a_response_hold_over_turns(rig: Rig, generate: Callable[..., Any]) -> None:
    """The cap of a turn and that of a response are two: what fits into the second is never cut by the first."""
    observed = len(rig.context.renderer.observation_ids([{"role": "tool", "content": "a"}], 0, -1))
    for response, reason, asked in (
        (24 + 2 * observed, "length", [8, 8, 8]),  # three turns of 8, two observations
        (23 + 2 * observed, "length", [8, 8, 7]),
        (16 + 2 * observed, "context_full", [8, 8]),
        (8 + observed + 3, "length", [8, 3]),  # half a turn: its environment does not see it
        (8 + observed, "context_full", [8]),
    ):
        batch, engine = generate([acting("row", "hi", {"say": "a"}, {"say": "a"}, {})], STRICT, response=response)
        assert stops(batch) == {"row": reason}
        assert [request.sampling.max_tokens for request in engine.requests] == asked
        assert int(batch.ragged(LOSS_MASK).values.sum()) == sum(asked)
        assert int(batch.ragged(INPUT_IDS).lengths[0] - batch.dense(PROMPT_LENGTH)[0]) <= response
        assert len(batch.objects[TURN_REWARDS][0]) == len(asked)
        told = [(info["cut"], info.get("told_cut", True)) for info in batch.objects[TURN_INFO][0]]
        assert told == [(1, True)] * len(asked), "the environment hears it too"


def test_images_that_cannot_be_used_become_texts(generate: Callable[..., Any]) -> None:
    good, large, thin = png(56, 56, 1), png(100, 100, 2), png(1, 300, 3)
    say = [{"role": "tool", "content": "a <image> b <image>"}, {"role": "user", "content": "c <image> d <image>"}]
    batch, _ = generate(
        [acting("row", "hi", {"say": say, "images": [large, good, thin, b"x"]}, {})], max_image_pixels=9999
    )
    text = batch.objects[RESPONSE_TEXT][0]
    assert "a [image left out: the image is 100 x 100, at most 9999 pixels" in text
    assert "c [image left out: the image is 1 x 300: one side" in text
    assert "d [image left out: an image of 1 bytes cannot be read" in text
    assert len(batch.objects[IMAGE_KEYS][0]) == text.count("<|image_pad|>") == 1


def test_an_episode_fails_alone(rig: Rig, generate: Callable[..., Any], notes: Path) -> None:
    fine = [acting(f"fine{k}", "hi", {"say": "on"}, {"say": "on"}, {}) for k in range(4)]
    broken = [
        acting("raises", "hi", {"say": "on"}, {"raise": True}),
        acting("wrong", "hi", {"return": 3}),
        acting("messages", "hi", {"say": "no place", "images": [png(56, 56, 1)]}),
        replace(acting("unknown", "hi", {}), env_name="nowhere"),
        acting("again", "hi", {"say": "on"}, {"raise_once": True, "say": "on"}, {}),
    ]
    alone, _ = generate(fine)
    batch, engine = generate([*broken, *fine], max_retries=1)
    expected = dict.fromkeys(("raises", "wrong", "messages", "unknown"), "failed")
    assert {name: reason for name, reason in stops(batch).items() if reason == "failed"} == expected
    kept = batch.rows([i for i, name in enumerate(batch.objects[ROW_ID]) if name.startswith("fine")])
    assert kept.ragged(INPUT_IDS).values.tolist() == alone.ragged(INPUT_IDS).values.tolist()
    failures = {batch.objects[ROW_ID][i]: batch.objects[SCORE_EXTRA][i].get("failure", "") for i in range(len(batch))}
    assert "RuntimeError: the tool broke in turn 2" in failures["raises"]
    assert "Traceback" in failures["raises"]
    assert "last of 2 tries" in failures["raises"]
    assert "StepResult is wanted" in failures["wrong"]
    assert "places for 0" in failures["messages"]
    assert "there are: scripted" in failures["unknown"]
    again = [request for request in engine.requests if request.request_id.startswith("again/")]
    assert [request.request_id[-4:] for request in again] == ["/0/0", "/1/0", "/0/1", "/1/1", "/2/1"]
    assert again[2].sampling.seed == request_seed(3, 0, "again", 0, 0, 1) != again[0].sampling.seed
    assert again[2].ids == again[0].ids, "nothing of the first try is left"
    end = time.monotonic() + 5.0
    while (lines := (notes / "again.txt").read_text()).count(" close\n") < 2 and time.monotonic() < end:
        time.sleep(0.02)
    assert (lines.count(" start\n"), lines.count(" close\n")) == (2, 2)


def test_a_process_that_dies_costs_its_episodes_a_try(generate: Callable[..., Any]) -> None:
    prompts = [acting("dies", "hi", {"die_once": True}, {})]
    prompts += [acting(f"beside{k}", "hi", {"say": "on", "sleep": 0.1}, {}) for k in range(3)]
    batch, _ = generate(prompts, max_retries=3)
    assert "failed" not in stops(batch).values()


def test_time_limits_and_nothing_waits_for_the_slowest(generate: Callable[..., Any]) -> None:
    prompts = [
        acting("hangs", "hi", {"say": "on", "reward": 0.5}, {"sleep": 3600}),
        acting("slow", "hi", {"say": "on", "sleep": 0.8}, {}),
        *[acting(f"quick{k}", "hi", {"say": "on"}, {"say": "on"}, {}) for k in range(6)],
    ]
    begin, cpu = time.perf_counter(), time.process_time()
    batch, engine = generate(prompts, episode_timeout=2.0, max_retries=0)
    assert time.perf_counter() - begin < 6.0
    assert time.process_time() - cpu < 1.5, "the loop sleeps while only tools are under way"
    assert [name for name, reason in stops(batch).items() if reason in ("time_limit", "failed")] == ["hangs"]
    hanging = batch.objects[ROW_ID].tolist().index("hangs")
    assert stops(batch)["hangs"] == "failed", "what it said before a call that hangs gets no score"
    assert "time limit: a tool call was still under way after 2 s" in batch.objects[SCORE_EXTRA][hanging]["failure"]
    assert not batch.ragged(LOSS_MASK).row(hanging).any()
    last = [request.request_id for request in engine.requests][-1]
    assert last == "slow/0/1/0"
    info = batch.objects[TURN_INFO][batch.objects[ROW_ID].tolist().index("slow")][0]
    assert 0.8 <= info["tool_seconds"] < 3.0
    assert 0.0 <= info["queue_seconds"] < 0.8


def test_an_episode_may_run_out_of_time_while_it_decodes(generate: Callable[..., Any]) -> None:
    sampling = replace(STRICT, max_tokens=500)
    prompts = [acting("first", "hi", {}), acting("later", "hi", {"say": "on"})]
    batch, engine = generate(prompts, sampling, response=900, episode_timeout=0.3)
    assert stops(batch) == {"first": "failed", "later": "failed"}
    assert "time limit: no turn ended within 0.3 s" in batch.objects[SCORE_EXTRA][0]["failure"]
    assert sorted(engine.aborted)[:1] == ["first/0/0/0"]
    assert engine.num_unfinished() == 0


def test_plain_rows_have_a_time_limit_too(generate: Callable[..., Any]) -> None:
    batch, engine = generate(
        [prompt("plain", "hi")], replace(STRICT, max_tokens=900), n=2, response=900, episode_timeout=0.3, max_retries=1
    )
    assert stops(batch) == {"plain": "failed"}
    for extra in batch.objects[SCORE_EXTRA]:
        assert "time limit: no turn ended within 0.3 s (rollout.agent.episode_timeout) (the last" in extra["failure"]
    assert set(engine.aborted) == {f"plain/{index}/0/{retry}" for index in (0, 1) for retry in (0, 1)}
    assert engine.num_unfinished() == 0


def test_the_reward_of_the_whole_is_asked_for_at_every_end(generate: Callable[..., Any]) -> None:
    """At the ends that the environment makes itself, its own reward says it all."""
    say: Act = {"say": "on", "reward": 0.5}
    scripts: dict[str, list[Act]] = {
        "max_turns": [say],
        "context_full": [say, {"say": "word " * 500, "reward": 0.5}],
        "image_limit": [{"say": "<image>" * 3, "images": [png(56, 84, 2)] * 3, "reward": 0.5}],
        "env_done": [{"reward": 0.5, "done": True}],
        "length": [{"reward": 0.5}],
    }
    prompts = [
        replace(acting(name, "hi", *script), tools_kwargs={"script": script, "finish": 0.25})
        for name, script in scripts.items()
    ]
    batch, _ = generate(prompts, STRICT, max_images=2)
    assert stops(batch) == {name: name for name in scripts}
    assert dict(zip(batch.objects[ROW_ID], batch.objects[TURN_REWARDS], strict=True)) == {
        "max_turns": (0.5, 0.5, 0.5, 0.75),
        "context_full": (0.5, 0.75),
        "image_limit": (0.75,),
        "env_done": (0.5,),
        "length": (0.5,),
    }


def test_rows_that_kill_their_process_cost_their_neighbours_nothing(generate: Callable[..., Any]) -> None:
    prompts = [acting(f"kills{k}", "hi", {"sleep": 0.2, "die": True}) for k in range(2)]
    prompts += [acting(f"beside{k}", "hi", {"say": "on", "sleep": 0.1}, {"sleep": 0.1}) for k in range(10)]
    batch, _ = generate(prompts, max_retries=1)
    reasons = stops(batch)
    assert [name for name, reason in reasons.items() if reason == "failed"] == ["kills0", "kills1"]
    retries = dict(zip(batch.objects[ROW_ID], batch.dense(RETRIES).tolist(), strict=True))
    assert all(retries[name] >= 1 for name in ("kills0", "kills1"))
    alone, _ = generate(prompts[2:])
    fine = batch.rows([i for i, name in enumerate(batch.objects[ROW_ID]) if name.startswith("beside")])
    assert fine.ragged(INPUT_IDS).values.tolist() == alone.ragged(INPUT_IDS).values.tolist(), "the same seeds again"


def test_timing_changes_nothing_where_that_is_asked_for(generate: Callable[..., Any]) -> None:
    def rows(seed: int) -> tuple[list[int], list[tuple[str, ...]]]:
        random = Random(seed)
        scripts = [[{"say": f"turn {turn}", "sleep": random.choice([0, 0.05])} for turn in range(2)] for _ in range(4)]
        prompts = [acting(f"d{k}", "hi", *script, {}) for k, script in enumerate(scripts)]
        batch, engine = generate(prompts, deterministic=True)
        return batch.ragged(INPUT_IDS).values.tolist(), [request.request_id for request in engine.requests]

    assert rows(1) == rows(2)


def test_a_stop_string_keeps_ids_and_text_in_step(rig: Rig, generate: Callable[..., Any], notes: Path) -> None:
    free, _ = generate([acting("free", "hi", {})], STRICT)
    sampled = free.ragged(INPUT_IDS).row(0)[free.ragged(LOSS_MASK).row(0)].tolist()
    text = rig.context.renderer.decode(sampled[:4])
    assert len(text) > 2
    stop = text[-2:-1]  # ends inside a token, or at its end
    prompts = [acting("free", "hi", {"say": "on"}, {})]
    batch, engine = generate(prompts, replace(STRICT, stop=(stop,)))
    first, second = engine.requests
    output = engine.outputs[first.request_id]
    assert output.finish_reason == "stop"
    assert list(output.ids) == sampled[: len(output.ids)], "ids are kept as they were sampled"
    closer = rig.context.renderer.eos_ids[0]
    assert second.ids[len(first.ids) + len(output.ids)] == closer, "what closes the turn belongs to the observation"
    whole = rig.context.renderer.decode(output.ids)
    lines = (notes / "free.txt").read_text()
    assert f" step {whole[: whole.index(stop) + 1]!r}\n" in lines, "what is behind the stop string is not acted on"
    assert int(batch.ragged(LOSS_MASK).values.sum()) == sum(len(out.ids) for out in engine.outputs.values())
