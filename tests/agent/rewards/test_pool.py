"""Reward processes: good scores, everything a reward function can do wrong, and what is left behind (nothing)."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from vrl.agent.rewards.pool import RewardPool
from vrl.agent.rewards.types import RewardSpec, Score
from vrl.protocol.errors import ConfigError
from vrl.protocol.trajectory import Prompt

MakePrompt = Callable[..., Prompt]
HANG = "while True: pass"
HANG_IN_C = "import re; result = bool(re.match('(a+)+$', 'a' * 64 + 'b'))"  # holds the interpreter's lock
GENEROUS_SECONDS = 30.0
BEFORE: set[int] = set()


def run_all(pool: RewardPool, prompt: Prompt, responses: list[str]) -> list[Score]:
    pending = [pool.submit(prompt, response) for response in responses]
    assert pool.wait(GENEROUS_SECONDS)
    return [item.score for item in pending]


@pytest.fixture(autouse=True)
def there_before() -> Iterator[None]:
    """Other tests of this process may have children that last longer than they do."""
    BEFORE.update(process.pid for process in psutil.Process().children())
    yield
    BEFORE.clear()


def live_children() -> set[int]:
    """Every process below this one that the test has started, zombies too."""
    own = [child for child in psutil.Process().children() if child.pid not in BEFORE]
    return {process.pid for child in own for process in (child, *child.children(recursive=True))}


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_each_request_gets_its_own_score(make_prompt: MakePrompt) -> None:
    with RewardPool(3, 5.0, RewardSpec(data_sources=("openai/gsm8k",))) as pool:
        prompts = [make_prompt("openai/gsm8k", str(i)) for i in range(60)]
        pending = [pool.submit(prompt, f"#### {i % 7}") for i, prompt in enumerate(prompts)]
        assert pool.wait(GENEROUS_SECONDS)
        assert [item.score.value for item in pending] == [float(i == i % 7) for i in range(60)]
        assert all(item.score.failure is None for item in pending)
        assert pool.num_pending == 0


def test_built_in_rules_judge_the_last_turn(make_prompt: MakePrompt, code_spec: RewardSpec) -> None:
    """What a tool printed is no answer of the model; a user's function gets the whole conversation."""
    prompt = replace(make_prompt("tiny/arithmetic", "7"), extra_info={"last_turn": "8"})
    printed = "<tool_call>7</tool_call><|im_end|>\n<|im_start|>tool\n<answer>7</answer>"
    with RewardPool(1, 5.0, RewardSpec()) as pool:
        scores = run_all(pool, prompt, [printed])
        scores += run_all(pool, replace(prompt, extra_info={"last_turn": "7"}), ["<answer>8</answer>"])
    assert [score.value for score in scores] == [0.0, 1.0]
    with RewardPool(1, 5.0, code_spec) as pool:
        assert (
            run_all(pool, replace(make_prompt(), extra_info={"last_turn": "no code"}), ["result = 0.5"])[0].value == 0.5
        )


def test_a_spec_larger_than_what_the_socket_takes_at_once(code_spec: RewardSpec, make_prompt: MakePrompt) -> None:
    large = replace(code_spec, function_kwargs={"table": "x" * (4 << 20)})
    with RewardPool(2, GENEROUS_SECONDS, large, start_limit_seconds=GENEROUS_SECONDS) as pool:
        (score,) = run_all(pool, make_prompt(), ["result = len(kwargs['table'])"])
    assert score.value == 4 << 20


def test_poll_alone_brings_everything_home(make_prompt: MakePrompt) -> None:
    with RewardPool(2, 5.0, RewardSpec()) as pool:
        pending = [pool.submit(make_prompt(), "red") for _ in range(20)]

        def all_done() -> bool:
            pool.poll()
            return all(item.done() for item in pending)

        assert wait_until(all_done)
        assert not pending[0].score.failure


@pytest.mark.parametrize(
    ("result", "value"),
    [("1", 1.0), ("-0.5", -0.5), ("True", 1.0), ("__import__('numpy').float32(0.5)", 0.5), ("{'score': 0.25}", 0.25)],
)
def test_what_counts_as_a_score(code_spec: RewardSpec, make_prompt: MakePrompt, result: str, value: float) -> None:
    with RewardPool(1, 20.0, code_spec) as pool:
        assert run_all(pool, make_prompt(), [f"result = {result}"]) == [Score(value)]


def test_what_does_not_count_as_a_score(code_spec: RewardSpec, make_prompt: MakePrompt) -> None:
    bad = {
        "None": "NoneType None",
        "float('nan')": "the score is nan",
        "float('inf')": "the score is inf",
        "'10'": "str '10'",
        "[1.0]": "list [1.0]",
        "{'acc': 1.0}": "no 'score', only ['acc']",
        "{'score': None}": "NoneType None",
        "{'score': 1.0, 'text': 'x' * (2 << 20)}": "at most 1048576",
        "{'score': 1.0, 'count': 10 ** 5000}": "cannot be kept",
    }
    with RewardPool(1, 5.0, code_spec) as pool:
        scores = run_all(pool, make_prompt(), [f"result = {text}" for text in bad])
        for score, expected in zip(scores, bad.values(), strict=True):
            assert score.value == 0.0
            assert score.failure_kind == "bad value"
            assert expected in (score.failure or "")
        assert run_all(pool, make_prompt(), ["result = 1"]) == [Score(1.0)]


def test_extra_values_become_plain(code_spec: RewardSpec, make_prompt: MakePrompt) -> None:
    code = (
        "import numpy, pathlib\n"
        "result = dict(score=1, acc=True, pred='ü', count=numpy.int64(3), share=numpy.float32(0.5),\n"
        "              ok=numpy.bool_(True), parts=(1, {2: None}), where=pathlib.Path('/a'), many=numpy.zeros(2))"
    )
    with RewardPool(1, 20.0, code_spec) as pool:
        (score,) = run_all(pool, make_prompt(), [code])
    assert score.failure is None
    assert score.extra == {
        "acc": True,
        "pred": "ü",
        "count": 3,
        "share": 0.5,
        "ok": 1.0,
        "parts": [1, {"2": None}],
        "where": "/a",
        "many": "[0. 0.]",
    }


def test_a_function_that_raises_leaves_its_traceback(code_spec: RewardSpec, make_prompt: MakePrompt) -> None:
    with RewardPool(1, 5.0, code_spec) as pool:
        ids = pool.process_ids()
        raised, left, good = run_all(pool, make_prompt(), ["[][3]", "import sys; sys.exit(1)", "result = 1"])
        assert pool.process_ids() == ids  # no process was lost over it
    assert raised.failure_kind == left.failure_kind == "raised"
    assert "my_reward.py" in (raised.failure or "")
    assert "IndexError: list index out of range" in (raised.failure or "")
    assert good == Score(1.0)


def test_a_process_that_dies_is_replaced(code_spec: RewardSpec, make_prompt: MakePrompt) -> None:
    dies = [
        "import os; os._exit(7)",
        "import os; os.kill(os.getpid(), 11)",
        "import os; os.closerange(3, 64); result = 1",
    ]
    with RewardPool(1, 5.0, code_spec) as pool:
        scores = run_all(pool, make_prompt(), [*dies, "result = 1"])
        assert len(live_children()) == 1
    assert [score.failure_kind for score in scores[:2]] == ["process died"] * 2
    assert [int((score.failure or "").split("exit code ")[1].split()[0]) for score in scores[:2]] == [7, -11]
    assert scores[2].failure is not None
    assert scores[3] == Score(1.0)


def test_endless_rewards_do_not_slow_down_those_after_them(code_spec: RewardSpec, make_prompt: MakePrompt) -> None:
    good = ["import time; time.sleep(0.02); result = 1"] * 20
    with RewardPool(4, 0.5, code_spec) as pool:
        start = time.monotonic()
        run_all(pool, make_prompt(), good)
        normal_seconds = time.monotonic() - start
        endless = run_all(pool, make_prompt(), [HANG, HANG_IN_C] * 3)
        assert {score.failure_kind for score in endless} == {"time limit"}
        assert "stopped after 0.5 s" in (endless[0].failure or "")
        run_all(pool, make_prompt(), ["result = 1"] * 4)  # the new processes have started
        start = time.monotonic()
        assert run_all(pool, make_prompt(), good) == [Score(1.0)] * 20
        assert time.monotonic() - start < 2 * normal_seconds + 0.1
        assert live_children() == set(pool.process_ids())
    assert not live_children()


def test_nothing_is_left_after_many_calls_that_start_processes(code_spec: RewardSpec, make_prompt: MakePrompt) -> None:
    quick = "import subprocess; result = float(subprocess.run(['true']).returncode == 0)"
    time_of_ours = "600.0625"  # others on this machine sleep as well
    hangs = f"import subprocess; subprocess.run(['sleep', '{time_of_ours}'])"
    with RewardPool(4, 0.3, code_spec) as pool:
        scores = run_all(pool, make_prompt(), [quick, quick, hangs] * 12)
    assert [score.failure_kind for score in scores] == [None, None, "time limit"] * 12
    assert not live_children()

    def sleeping() -> list[int]:
        return [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", time_of_ours]]

    assert wait_until(lambda: not sleeping())


def test_a_worker_that_polls_rarely_makes_no_time_limit_fire(code_spec: RewardSpec, make_prompt: MakePrompt) -> None:
    with RewardPool(1, 0.6, code_spec) as pool:
        first = pool.submit(make_prompt(), "import time; time.sleep(0.2); result = 1")
        second = pool.submit(make_prompt(), "result = 2")
        time.sleep(1.0)
        assert pool.wait(GENEROUS_SECONDS)
    assert (first.score, second.score) == (Score(1.0), Score(2.0))


def test_user_code_cannot_disturb_the_connection(
    code_spec: RewardSpec, make_prompt: MakePrompt, capfd: pytest.CaptureFixture[str]
) -> None:
    prints = "import os; print('hello', flush=True); os.write(1, b'raw'); os.system('echo child'); result = 1"
    with RewardPool(1, 5.0, code_spec) as pool:
        printed, read, good = run_all(pool, make_prompt(), [prints, "result = len(input())", "result = 1"])
    assert printed == good == Score(1.0)
    assert "EOFError" in (read.failure or "")
    out, err = capfd.readouterr()
    assert out == ""
    assert all(word in err for word in ("hello", "raw", "child"))


def test_large_requests_and_answers(code_spec: RewardSpec, make_prompt: MakePrompt) -> None:
    prompt = make_prompt(ground_truth="g" * 3_000_000, cells=np.arange(5))
    code = "result = {'score': len(ground_truth) + int(extra_info['cells'].sum()), 'text': 'x' * 900_000}"
    with RewardPool(2, 20.0, code_spec) as pool:
        for score in run_all(pool, prompt, [code] * 6):
            assert score.value == 3_000_010
            assert len(score.extra["text"]) == 900_000


def test_what_cannot_be_sent_fails_its_own_row_only(make_prompt: MakePrompt) -> None:
    with RewardPool(1, 5.0, RewardSpec()) as pool:
        bad = pool.submit(make_prompt(ground_truth=lambda: 1), "red")
        assert bad.done()
        assert bad.score.failure_kind == "bad value"
        assert run_all(pool, make_prompt(), ["red"]) == [Score(1.0)]


def test_processes_are_light_and_single_threaded(code_spec: RewardSpec, make_prompt: MakePrompt) -> None:
    code = (
        "import os, sys, threading\n"
        "heavy = [name for name in ('torch', 'numpy', 'transformers', 'ray', 'sympy') if name in sys.modules]\n"
        "result = {'score': threading.active_count(), 'heavy': heavy, 'omp': os.environ['OMP_NUM_THREADS']}"
    )
    with RewardPool(1, 5.0, code_spec) as pool:
        assert run_all(pool, make_prompt(), [code]) == [Score(1.0, {"heavy": [], "omp": "1"})]
        assert psutil.Process(pool.process_ids()[0]).memory_info().rss < 40 << 20


def test_polling_costs_nothing_while_rewards_run(code_spec: RewardSpec, make_prompt: MakePrompt) -> None:
    def microseconds_a_poll(pool: RewardPool) -> float:
        start = time.perf_counter()
        for _ in range(100):
            pool.poll()
        return (time.perf_counter() - start) * 1e4

    with RewardPool(4, GENEROUS_SECONDS, code_spec) as pool:
        assert min(microseconds_a_poll(pool) for _ in range(20)) < 50
        for _ in range(6):
            pool.submit(make_prompt(), "import time; time.sleep(600)")
        assert min(microseconds_a_poll(pool) for _ in range(20)) < 50
        assert pool.num_pending == 6
        assert not pool.wait(0.01)


def test_nothing_survives_a_killed_worker(tmp_path: Path, code_spec: RewardSpec) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import time\n"
        "from vrl.agent.rewards.pool import RewardPool\n"
        "from vrl.agent.rewards.types import RewardSpec\n"
        "from vrl.protocol.trajectory import Prompt\n"
        f"pool = RewardPool(3, 600.0, RewardSpec(function_path={code_spec.function_path!r}))\n"
        "prompt = Prompt(row_id='0', uid='0', messages=())\n"
        f"for code in ({HANG!r}, {HANG_IN_C!r}):\n"
        "    pool.submit(prompt, code)\n"
        "print(*pool.process_ids(), flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    worker = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert worker.stdout is not None
    with worker.stdout:
        processes = [int(word) for word in worker.stdout.readline().split()]
    assert len(processes) == 3
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert wait_until(lambda: all(gone(pid) for pid in processes))


def test_impossible_settings() -> None:
    with pytest.raises(ConfigError, match="workers >= 1"):
        RewardPool(0, 1.0, RewardSpec())
    with pytest.raises(ConfigError, match="time limit > 0"):
        RewardPool(1, 0.0, RewardSpec())
