"""The interpreter as an environment: cells in fences or tags, variables that live, images that come back."""

import pytest

from tests.agent.episodes import opened, png, prompt, texts
from tests.agent.in_process_runner import InProcessRunner
from vrl.agent.environments.code import CodeEnvironment
from vrl.agent.environments.registry import Environments, EnvironmentSettings
from vrl.agent.environments.tool_calls import ToolEnvironment
from vrl.protocol.errors import ConfigError


def start(runner: InProcessRunner, **config: object) -> CodeEnvironment | ToolEnvironment:
    settings = EnvironmentSettings(environments={"code": {"class": "code_interpreter", "config": config}})
    environment = Environments(settings, runner).start(prompt(png(60, 40), env_name="code"))
    assert isinstance(environment, CodeEnvironment | ToolEnvironment)
    return environment


def test_cells_share_variables_and_images_come_back() -> None:
    runner = InProcessRunner()
    environment = start(runner, max_parallel_calls=2)
    assert runner.open_sessions == 0  # no interpreter for a model that writes no code
    first = environment.step("Let me see.\n```python\nx = 20\n```\n```python\nx += 1\nprint(x)\n```\n```python\nx\n```")
    assert texts(first) == [
        "The code ran and printed nothing.",
        "21",
        "Error: 1 further code block was not run: at most 2 run in a turn",
    ]
    assert first.info == {"tool_calls": 2, "tool_errors": 1, "malformed_calls": 0, "code_seconds": 0.02}
    failed = environment.step("```python\nprint('before')\n1 / 0\n```")
    assert texts(failed) == ["before\nZeroDivisionError: division by zero"]
    assert failed.info["tool_errors"] == 1
    shown = environment.step("```python\nprint(x)\nshow(image_1.rotate(90, expand=True))\n```")
    assert texts(shown) == ["21\n<image>"]
    assert shown.observation is not None
    assert opened(shown.observation.images[0]).size == (40, 60)
    for cut in (False, True):
        unclosed = environment.step("```python\nprint(1)", cut=cut)
        assert "is not closed" in texts(unclosed)[0]
        assert unclosed.info["malformed_calls"] == (not cut)
    many = environment.step("```python\n```\n" * 4 + "```python\nprint(x)\n```\n" * 40)
    assert [text[:30] for text in texts(many)[:2]] == ["Error: The code block is empty"] * 2
    assert texts(many)[2:] == [
        "21",
        "21",
        "Error: more than 28 further code blocks were not run: at most 2 run in a turn",
    ]
    assert (many.info["tool_calls"], many.info["tool_errors"], many.info["malformed_calls"]) == (2, 1, 4)
    ended = environment.step("It is <answer>21</answer>\n```python\nprint('not run')\n```")
    assert ended.observation is None
    environment.close()
    assert runner.open_sessions == 0


def test_an_answer_printed_by_code_is_no_answer() -> None:
    environment = start(InProcessRunner())
    assert texts(environment.step("```python\nprint('<answer>4</answer>')\n```")) == ["<answer>4</answer>"]
    assert environment.step("4").observation is None


def test_other_forms() -> None:
    environment = start(InProcessRunner(), format="code_tag", role="user")
    result = environment.step("<code>\n```python\nprint(1 + 1)\n```\n</code>")
    assert result.observation is not None
    assert result.observation.messages == ({"role": "user", "content": "2"},)
    hermes = start(InProcessRunner(), format="hermes")
    assert texts(hermes.step('<tool_call>{"name": "python", "arguments": {"code": "print(3)"}}</tool_call>')) == ["3"]


def test_without_a_sandbox_it_says_so() -> None:
    with pytest.raises(ConfigError, match="code_interpreter needs a code sandbox"):
        Environments(EnvironmentSettings()).kind("code_interpreter")
    with pytest.raises(ConfigError, match=r"format='pascal': use one of python, code_tag, hermes"):
        start(InProcessRunner(), format="pascal")
