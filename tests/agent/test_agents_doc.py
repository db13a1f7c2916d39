"""The code, settings and rows of docs/agents.md do what the page says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.agent.episodes import call, texts
from tests.agent.in_process_runner import InProcessRunner
from vrl.agent.environments.registry import Environments, known_environments, settings_of
from vrl.agent.rewards.registry import find_rule, known_data_sources
from vrl.agent.rewards.scoring import make_scorer
from vrl.agent.rewards.types import RewardRequest, RewardSpec, Score
from vrl.agent.tools.registry import BUILT_IN_TOOLS
from vrl.data.dataset import load_rows
from vrl.protocol.config.builder import build
from vrl.protocol.trajectory import Prompt

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
TOOL, GAME = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TOOLS, SETTINGS, SERVERS, REWARD = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
ROWS = [json.loads(row) for row in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environments:
    """The page's files in a folder, and its settings."""
    monkeypatch.chdir(tmp_path)
    Path("my_tools.py").write_text(TOOL)
    Path("my_games.py").write_text(GAME)
    Path("tools.yaml").write_text(yaml.safe_dump(TOOLS))
    rollout = SETTINGS["actor_rollout_ref"]["rollout"] | {"multi_turn": {"tool_config_path": "tools.yaml"}}
    settings = settings_of(build({"actor_rollout_ref": {"rollout": rollout}}))
    assert {"guess", "math", "look", "tools"} <= set(known_environments(settings))
    return Environments(settings, InProcessRunner())


def prompt_of(row: dict[str, Any], folder: Path) -> Prompt:
    """The row as the data layer reads it from a file."""
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert find_rule(row["data_source"])
    return load_rows(folder / "rows.jsonl", env_names=["guess", "tools"])[0]


def test_the_code_is_as_short_as_the_headings_say() -> None:
    assert len(TOOL.splitlines()) <= 20
    assert len(GAME.splitlines()) <= 40


def test_the_tool(environments: Environments, tmp_path: Path) -> None:
    environment = environments.start(prompt_of(ROWS[0], tmp_path))
    first = environment.step(call("dictionary", word="zebu"))
    assert (texts(first), first.info["found"]) == (["a humped ox"], 1)
    assert texts(environment.step(call("dictionary", word="vrl"))) == ["unknown word"]
    assert texts(environment.step(call("calculator", expression="1 + 1"))) == ["2"]
    last = environment.step("<answer>ox</answer>")
    assert (last.observation, last.reward) == (None, 0.0)
    environment.close()
    environments.close()


def test_the_environment(environments: Environments, tmp_path: Path) -> None:
    environment = environments.start(prompt_of(ROWS[1], tmp_path))
    told = [
        texts(environment.step(text))[0]
        for text in ("hm", "<answer>51</answer>", "<answer>5</answer>", "<answer>20</answer>")
    ]
    assert [text.split()[0] for text in told] == ["Write", "Guess", "Higher.", "Lower."]
    won = environment.step("<answer>17</answer>")
    assert (won.reward, won.done, won.info) == (1.0, True, {"guesses_left": 4})
    lost = environments.start(prompt_of(ROWS[1], tmp_path))
    assert [lost.step("<answer>1</answer>").done for _ in range(7)] == [False] * 6 + [True]


def test_the_reward() -> None:
    custom = build(REWARD).custom_reward_function
    spec = RewardSpec(function_path=custom.path, function_kwargs=custom.reward_kwargs)
    request = RewardRequest("anything", "<answer>Paris</answer> it is", "Paris")
    parts = {"exact_match": 0.9, "exact_match/score": 1.0, "format": 0.0, "format/score": 0.0}
    assert make_scorer(spec)(request) == Score(0.9, parts)
    named = re.findall(
        r"`([\w/*]+)`", "".join(re.findall(r"^\| (`(?:exact|format|arc|code_tests|llm|comb).*?) \|", PAGE, re.M))
    )
    assert len(named) >= 12
    assert set(named) <= set(known_data_sources())


def test_the_other_entries_and_the_tables(environments: Environments) -> None:
    assert [schema["function"]["name"] for schema in environments.kind("math").schemas] == ["calculator", "python"]
    assert len(environments.kind("look").schemas) == 2
    assert set(re.findall(r"^\| `(\w+)` \| `\w+`", PAGE, re.MULTILINE)) == set(BUILT_IN_TOOLS)
    assert set(SERVERS["tools"][0]["mcp"]) == {"servers", "tool_selected_list", "timeout", "per_episode"}
