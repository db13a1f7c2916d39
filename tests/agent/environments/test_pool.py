"""Real tool processes: calls side by side, failures that stay with their episode, nothing left behind."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from vrl.agent.environments.pool import EnvironmentPool, PendingStep, check_environments
from vrl.agent.environments.wire import EnvironmentSpec, KindSpec, StepOutcome
from vrl.protocol.errors import ConfigError, WorkerError
from vrl.protocol.trajectory import Prompt

KINDS = "tests.agent.environments.kinds"


def spec_of(folder: Path | None = None, **kwargs: Any) -> EnvironmentSpec:
    settings = kwargs if folder is None else {"folder": str(folder), **kwargs}
    return EnvironmentSpec(kinds={"scripted": KindSpec(factory=f"{KINDS}:Kind", kwargs=settings)})


def prompt(uid: str, *script: dict[str, Any]) -> Prompt:
    return Prompt(row_id=uid, uid=uid, messages=[], env_name="scripted", tools_kwargs={"script": script})


def outcomes(pool: EnvironmentPool, pending: list[PendingStep], seconds: float = 10.0) -> list[StepOutcome]:
    end = time.monotonic() + seconds
    while not all(step.done() for step in pending):
        assert time.monotonic() < end, "the tools take too long"
        pool.poll(0.2)
    return [step.outcome for step in pending]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentPool]:
    with EnvironmentPool(2, spec_of(tmp_path_factory.mktemp("notes"))) as pool:
        yield pool


def one(pool: EnvironmentPool, *script: dict[str, Any], uid: str = "one") -> StepOutcome:
    episode = pool.start(prompt(uid, *script))
    (outcome,) = outcomes(pool, [pool.step(episode, "go")])
    pool.close_episode(episode)
    return outcome


def test_results_come_back_as_they_were(pool: EnvironmentPool) -> None:
    messages = [{"role": "tool", "content": "see <image>\ud7ff"}, {"role": "user", "content": [{"type": "image"}]}]
    images = [b"\x89PNG" + os.urandom(200_000), b"\xff\xd8"]
    outcome = one(pool, {"say": messages, "images": images, "reward": 0.25, "info": {"malformed": 1}})
    assert outcome.failure is None
    assert outcome.result is not None
    assert outcome.result.observation is not None
    assert list(outcome.result.observation.messages) == messages
    assert list(outcome.result.observation.images) == images
    assert (outcome.result.reward, outcome.result.done) == (0.25, False)
    assert outcome.result.info["malformed"] == outcome.result.info["calls"] == 1
    assert pool.schemas["scripted"][0]["function"]["name"] == "act"


def test_images_beyond_the_size_of_an_answer_become_notes(pool: EnvironmentPool) -> None:
    images = [bytes(20 << 20)] * 3
    outcome = one(pool, {"say": "<image> <image> <image>", "images": images})
    assert outcome.result is not None
    assert outcome.result.observation is not None
    parts = outcome.result.observation.messages[0]["content"]
    assert [part["type"] for part in parts] == ["image", "text", "image", "text", "text"]
    assert "[image left out" in parts[-1]["text"]
    assert list(outcome.result.observation.images) == images[:2]


def test_half_a_surrogate_pair_is_replaced(pool: EnvironmentPool) -> None:
    outcome = one(pool, {"say": "a\ud800b \U0001f600"})
    assert outcome.result is not None
    assert outcome.result.observation is not None
    assert outcome.result.observation.messages[0]["content"] == "a?b \U0001f600"


def test_waits_of_episodes_overlap_and_calls_of_one_do_not(pool: EnvironmentPool) -> None:
    begin = time.monotonic()
    episodes = [pool.start(prompt(f"wait{n}", {"sleep": 0.3, "say": str(n)})) for n in range(24)]
    found = outcomes(pool, [pool.step(episode, "go") for episode in episodes])
    assert time.monotonic() - begin < 4.0, "24 waits of 0.3 s on two processes"
    assert [o.result.observation.messages[0]["content"] for o in found if o.result and o.result.observation] == [
        str(n) for n in range(24)
    ]
    assert all(0.3 <= outcome.run_seconds < 3.0 and outcome.wait_seconds >= 0.0 for outcome in found)
    for episode in episodes:
        pool.close_episode(episode)


@pytest.mark.parametrize(
    ("act", "failure"),
    [
        ({"raise": True}, "step raised: .*the tool broke in turn 1"),
        ({"return": "text"}, "a StepResult is wanted"),
        ({"reward": float("nan")}, "a finite number is wanted"),
        ({"reward": "much"}, "could not convert"),
        ({"say": ["no message"]}, "step raised"),
        ({"say": [{"role": "oracle", "content": "x"}]}, "a role of"),
        ({"say": [{"role": "tool", "content": 3}]}, "step raised"),
        ({"say": [{"role": "tool", "content": ["x"]}]}, "typed parts"),
        ({"cancel": True}, "step raised: .*CancelledError"),
        ({"die": True}, "process died: .*exit code 7"),
    ],
)
def test_failures_are_told(pool: EnvironmentPool, act: dict[str, Any], failure: str) -> None:
    outcome = one(pool, act)
    assert outcome.result is None
    assert outcome.failure is not None
    assert re.search(failure, outcome.failure, re.DOTALL)


def test_a_process_that_dies_fails_its_own_episodes_only(pool: EnvironmentPool) -> None:
    episodes = [pool.start(prompt(f"shared{n}", {"say": "fine"}, {"say": "fine"})) for n in range(4)]
    first = outcomes(pool, [pool.step(episode, "go") for episode in episodes])
    assert all(outcome.failure is None for outcome in first)
    killed = psutil.Process(pool.process_ids()[0])
    killed.kill()
    killed.wait(5)
    second = [outcomes(pool, [pool.step(episode, "go")])[0] for episode in episodes]
    assert sorted(outcome.failure is None for outcome in second) == [False, False, True, True]
    for episode in episodes:
        pool.close_episode(episode)
    assert one(pool, {"say": "fine"}).failure is None
    assert len(pool.process_ids()) == 2


def test_a_process_that_dies_costs_those_a_try_that_may_have_killed_it(tmp_path: Path) -> None:
    with EnvironmentPool(1, spec_of(tmp_path)) as pool:
        idle, waits, dies = (
            pool.start(prompt(uid, {"say": "fine"}, act))
            for uid, act in (("idle", {}), ("waits", {"sleep": 3600}), ("dies", {"sleep": 0.3, "die": True}))
        )
        outcomes(pool, [pool.step(episode, "go") for episode in (idle, waits, dies)])
        found = outcomes(pool, [pool.step(episode, "go") for episode in (waits, dies)])
        found += outcomes(pool, [pool.step(idle, "go")])
        assert [(outcome.charged, outcome.suspect) for outcome in found] == [
            (False, True),
            (False, True),
            (False, False),
        ]
        first, second = (pool.start(prompt(f"s{n}", {"sleep": 0.3, "die": True}), most_calls=1) for n in range(2))
        steps = [pool.step(episode, "go") for episode in (first, second)]
        found = outcomes(pool, steps)
        assert [(outcome.charged, outcome.suspect) for outcome in found] == [(True, True), (False, False)]
        assert all(outcome.failure and "exit code 7" in outcome.failure for outcome in found)
        assert len(pool.process_ids()) == 1, "the process of suspects has no successor"


def test_suspects_act_one_after_the_other(tmp_path: Path) -> None:
    with EnvironmentPool(1, spec_of(tmp_path)) as pool:
        episodes = [pool.start(prompt(f"one{n}", {"sleep": 0.2, "say": "fine"}), most_calls=1) for n in range(3)]
        steps = [pool.step(episode, "go") for episode in episodes]
        found = outcomes(pool, steps)
        assert all(outcome.failure is None for outcome in found)
        held = [step.held_seconds for step in steps]
        assert held[1] - held[0] >= 0.2
        assert held[2] - held[1] >= 0.2
        assert len(pool.process_ids()) == 2
        for episode in episodes:
            pool.close_episode(episode)
        assert len(pool.process_ids()) == 1


def test_a_call_that_hangs_is_given_up(pool: EnvironmentPool) -> None:
    before = pool.process_ids()
    neighbours = [pool.start(prompt(f"beside{n}", {"say": "fine"})) for n in range(2)]
    hanging = pool.start(prompt("hangs", {"sleep": 3600}))
    step = pool.step(hanging, "go")
    pool.poll(0.2)
    pool.close_episode(hanging)
    assert not step.done()
    assert all(o.failure is None for o in outcomes(pool, [pool.step(episode, "go") for episode in neighbours]))
    for episode in neighbours:
        pool.close_episode(episode)
    assert one(pool, {"say": "fine"}).failure is None
    end = time.monotonic() + 10
    while len(alive := [pid for pid in before if psutil.pid_exists(pid)]) > 1 and time.monotonic() < end:
        pool.poll(0.1)
    assert len(alive) == 1, "the process with the thread that hangs is gone"


def test_a_process_whose_interpreter_is_held_is_replaced() -> None:
    with EnvironmentPool(1, spec_of(), silence_limit_seconds=0.5) as pool:
        quiet = pool.start(prompt("quiet", {"sleep": 1.5, "say": "fine"}))
        assert outcomes(pool, [pool.step(quiet, "go")])[0].failure is None, "a long wait is no silence"
        beside, holds = (
            pool.start(prompt(uid, act)) for uid, act in (("beside", {"say": "x"}), ("holds", {"hold": True}))
        )
        (held,) = outcomes(pool, [pool.step(holds, "go")])
        assert "did not answer for 0.5 s" in str(held.failure)
        assert "did not answer" in str(pool.step(beside, "go").outcome.failure)
        assert one(pool, {"say": "fine"}).failure is None


def test_environments_and_kinds_are_closed(tmp_path: Path) -> None:
    with EnvironmentPool(1, spec_of(tmp_path)) as pool:
        (pid,) = pool.process_ids()
        done, still_open = (pool.start(prompt(uid, {"say": "x"})) for uid in ("done", "open"))
        outcomes(pool, [pool.step(done, "one"), pool.step(still_open, "one")])
        pool.close_episode(done)
    assert not psutil.pid_exists(pid)
    notes = {
        uid: [line.split(" ", 1)[1] for line in (tmp_path / f"{uid}.txt").read_text().splitlines()]
        for uid in ("done", "open")
    }
    assert notes == {uid: ["start", "step 'one'", "close"] for uid in notes}
    assert (tmp_path / f"kind_closed_{pid}").exists()


def test_a_start_that_fails_is_told_at_the_first_step() -> None:
    with EnvironmentPool(1, spec_of(broken_start=True)) as pool:
        failure = one(pool, {"say": "x"}).failure
        assert failure is not None
        assert "no server there" in failure
        unpicklable = pool.start(Prompt(row_id="f", uid="f", messages=[], ground_truth=lambda: 0, env_name="scripted"))
        assert "cannot be sent" in str(pool.step(unpicklable, "go").outcome.failure)


def test_kinds_are_checked_before_training() -> None:
    assert [schema["type"] for schema in check_environments(spec_of())["scripted"]] == ["function"]
    for factory, message in (
        (f"{KINDS}:refuses", "'bad'.*url is wanted"),
        (f"{KINDS}:missing", "there is no 'missing'"),
        ("tests.nowhere:Kind", "ModuleNotFoundError"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_environments(EnvironmentSpec(kinds={"bad": KindSpec(factory=factory)}))
    with pytest.raises(WorkerError, match="exit code 3 before they are ready"):
        check_environments(EnvironmentSpec(kinds={"bad": KindSpec(factory=f"{KINDS}:dies")}))


def test_processes_have_no_torch_and_die_with_their_parent(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "from tests.agent.environments.test_pool import *\n"
        "pool = EnvironmentPool(1, spec_of())\n"
        "pool.step(pool.start(prompt('hangs', {'sleep': 3600})), 'go')\n"
        "pool.poll(0.3)\n"
        "print(*pool.process_ids(), flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    maps = Path(f"/proc/{pid}/maps").read_text()
    parent.kill()
    parent.wait()
    assert "libtorch" not in maps
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def wait_until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
