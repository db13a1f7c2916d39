"""A user's reward file: what is wrong with it is said at start, in one message."""

import os
from pathlib import Path

import psutil
import pytest

from vrl.agent.rewards.pool import RewardPool, check_rewards
from vrl.agent.rewards.types import RewardSpec
from vrl.protocol.errors import ConfigError, RewardError

GOOD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n"


def spec_of(tmp_path: Path, text: str, **settings: object) -> RewardSpec:
    path = tmp_path / "reward.py"
    path.write_text(text)
    return RewardSpec(function_path=str(path), **settings)


def message_of(spec: RewardSpec) -> str:
    before = psutil.Process().children()
    with pytest.raises(ConfigError) as error:
        check_rewards(spec)
    assert psutil.Process().children() == before
    return str(error.value)


def test_a_good_file_and_all_built_in_rules_pass(tmp_path: Path) -> None:
    check_rewards(spec_of(tmp_path, GOOD))
    check_rewards(RewardSpec(data_sources=("tiny/visual", "openai/gsm8k", "reasoning_gym/chain_sum")))


def test_missing_file(tmp_path: Path) -> None:
    spec = RewardSpec(function_path=str(tmp_path / "none.py"))
    assert (
        message_of(spec) == f"custom_reward_function.path={spec.function_path}: there is no file {spec.function_path}"
    )


def test_not_a_python_file(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_text(GOOD)
    assert "must end in .py" in message_of(RewardSpec(function_path=str(tmp_path / "reward.txt")))


def test_missing_name_lists_what_there_is(tmp_path: Path) -> None:
    message = message_of(spec_of(tmp_path, GOOD, function_name="my_score"))
    assert "custom_reward_function.name=my_score" in message
    assert "it has compute_score" in message
    assert "no function at all" in message_of(spec_of(tmp_path, "compute_score = 3\n"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("def compute_score(:\n", "SyntaxError"),
        ("import sys; sys.exit('no licence')\n", "SystemExit: no licence"),
    ],
)
def test_a_file_that_does_not_import(tmp_path: Path, text: str, expected: str) -> None:
    message = message_of(spec_of(tmp_path, text))
    assert "custom_reward_function.path=" in message
    assert expected in message


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    assert "signature (answer, truth)" in message_of(spec_of(tmp_path, "def compute_score(answer, truth): return 1\n"))
    message = message_of(spec_of(tmp_path, GOOD, function_kwargs={"scale": 2.0}))
    assert "extra_info, scale)" in message
    assert "unexpected keyword argument 'scale'" in message


def test_unknown_data_source() -> None:
    assert "no reward rule for data source 'my/task'" in message_of(RewardSpec(data_sources=("tiny/visual", "my/task")))


def test_a_file_that_never_finishes_importing(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "import time; time.sleep(600)\n" + GOOD)
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match=r"did not load within 0\.5 s"):
        check_rewards(spec, start_limit_seconds=0.5)
    assert psutil.Process().children() == before


def test_a_file_that_kills_its_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = spec_of(tmp_path, "import os; print('licence server is down'); os._exit(3)\n" + GOOD)
    before = psutil.Process().children()
    with pytest.raises(RewardError, match="exit code 3"):
        check_rewards(spec)
    assert "licence server is down" in capfd.readouterr().err
    assert psutil.Process().children() == before


def test_modules_beside_the_file_and_relative_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_prompt
) -> None:
    (tmp_path / "beside_it.py").write_text("BONUS = 0.25\n")
    (tmp_path / "reward.py").write_text(
        "from dataclasses import dataclass\n"
        "from beside_it import BONUS\n"
        "@dataclass\n"
        "class Parts:\n    right: float\n"
        "def my_score(data_source, solution_str, ground_truth, extra_info, scale):\n"
        "    parts = Parts(float(solution_str == ground_truth))\n"
        "    return {'score': scale * parts.right + BONUS, 'acc': parts.right, 'source': data_source}\n"
    )
    monkeypatch.chdir(tmp_path)
    spec = RewardSpec(function_path=f".{os.sep}reward.py", function_name="my_score", function_kwargs={"scale": 2.0})
    with RewardPool(1, 5.0, spec) as pool:
        pending = pool.submit(make_prompt("my/task", "red"), "red")
        assert pool.wait(10.0)
    assert pending.score.value == 2.25
    assert pending.score.extra == {"acc": 1.0, "source": "my/task"}
