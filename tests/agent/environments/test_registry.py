"""Environments by name: built in, from settings, by file and module; what is wrong is said in one message."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.agent.episodes import call, prompt, texts
from tests.agent.in_process_runner import InProcessRunner
from vrl.agent.environments.observations import TextLimit
from vrl.agent.environments.plain import PlainKind
from vrl.agent.environments.registry import Environments, EnvironmentSettings, known_environments, settings_of
from vrl.agent.environments.tool_calls import TurnLimits
from vrl.protocol.config.builder import build
from vrl.protocol.errors import ConfigError, DataError

USER_FILE = '''
from vrl.agent.environments.types import Observation, StepResult


class Echo:
    """Says the same until it is told to stop."""

    def __init__(self, prompt, times=1):
        self.left = times

    def step(self, text):
        self.left -= 1
        message = {"role": "user", "content": text}
        return StepResult(observation=Observation(messages=(message,)), done=self.left == 0)

    def close(self):
        pass


class EchoKind:
    schemas = ()

    def __init__(self, times):
        self.times = times

    def start(self, prompt):
        return Echo(prompt, self.times)

    def close(self):
        pass


class Shout:
    """DeepEyes' interface."""

    name = "shout"

    def reset(self, raw_prompt, multi_modal_data, origin_multi_modal_data):
        pass

    def execute(self, action_string):
        return action_string.upper(), 0.0, False, {}


class Nothing:
    pass


class Upper:
    """verl's interface, without a parent."""

    def __init__(self, config, tool_schema):
        self.mark = config["mark"]

    def execute(self, instance_id, parameters):
        return parameters["text"].upper() + self.mark
'''

SCHEMA = {"function": {"name": "upper", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}}


@pytest.fixture
def user_file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return str(path)


def environments(**entries: Any) -> Environments:
    return Environments(EnvironmentSettings(environments=entries))


def test_no_name_is_plain() -> None:
    made = environments()
    assert isinstance(made.kind(None), PlainKind)
    result = made.start(prompt()).step("anything <tool_call>")
    assert (result.observation, result.reward, result.done) == (None, 0.0, False)
    assert made.kind("") is made.kind("plain")


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(
        DataError, match=r"env_name 'toolz' is unknown; known are .*code_interpreter.*mine.*plain.*tools"
    ):
        environments(mine="tools").kind("toolz")
    known = known_environments(EnvironmentSettings(environments={"mine": "not:loaded"}))
    assert {"plain", "tools", "code_interpreter", "image_tools", "mine"} <= set(known)


def test_users_classes_by_file(user_file: str) -> None:
    made = environments(
        echo={"class": f"{user_file}:Echo", "config": {"times": 2}},
        kind={"class": f"{user_file}:EchoKind", "config": {"times": 1}},
        shout=f"{user_file}:Shout",
    )
    echo = made.start(prompt(env_name="echo"))
    assert [echo.step(text).done for text in ("a", "b")] == [False, True]
    assert made.start(prompt(env_name="kind")).step("a").done
    assert texts(made.start(prompt(env_name="shout")).step("hey")) == ["HEY"]
    made.close()


def test_a_tool_file_as_verl_has_it(user_file: str, tmp_path: Path) -> None:
    tools = tmp_path / "tools.yaml"
    tools.write_text(
        f"""
tools:
  - class_name: {user_file}:Upper
    config: {{mark: "!"}}
    tool_schema:
      type: function
      function:
        name: upper
        description: Shout.
        parameters: {{type: object, properties: {{text: {{type: string}}}}, required: [text]}}
  - class_name: calculator
  - class_name: verl.tools.image_zoom_in_tool.ImageZoomInTool
    config: {{num_workers: 2, timeout: 30, type: native, rate_limit: 5, min_sides: 28}}
    tool_schema: {{function: {{name: look_closer, parameters: {{type: object}}}}}}
"""
    )
    with pytest.raises(ConfigError, match=r"tools\[2\]: an image tool has no setting min_sides"):
        Environments(EnvironmentSettings(tool_config_path=str(tools))).kind("tools")
    tools.write_text(tools.read_text().replace("min_sides", "min_side"))
    made = Environments(pickle.loads(pickle.dumps(EnvironmentSettings(tool_config_path=str(tools)))))
    names = [schema["function"]["name"] for schema in made.kind("tools").schemas]
    assert names == ["upper", "calculator", "look_closer"]
    environment = made.start(prompt(env_name="tools"))
    assert texts(environment.step(call("upper", text="hey"))) == ["HEY!"]
    assert texts(environment.step(call("calculator", expression="6 * 7"))) == ["42"]
    made.close()


def tool(class_name: str, **config: Any) -> dict[str, Any]:
    return {"class_name": class_name, "config": config}


@pytest.mark.parametrize(
    "entry",
    [
        tool(
            "verl.tools.search_tool.SearchTool",
            **{"retrieval_service_url": "http://127.0.0.1:8000/retrieve", "num_workers": 120, "rate_limit": 120},
            **{"timeout": 30, "type": "native"},
        ),
        tool(
            "verl.tools.sandbox_fusion_tools.SandboxFusionTool",
            **{"sandbox_fusion_url": "https://x/run_code", "num_workers": 10, "enable_global_rate_limit": True},
            **{"rate_limit": 10, "default_timeout": 30, "default_language": "python", "memory_limit_mb": 1024},
            type="native",
        ),
    ],
)
def test_entries_of_verls_load(entry: Any) -> None:
    entries = {"mine": {"class": "tools", "config": {"tools": [entry]}}}
    made = Environments(EnvironmentSettings(environments=entries), InProcessRunner())
    assert len(made.kind("mine").schemas) == 1
    made.close()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"class": "FILE:Nothing"}, "is no environment: it needs start"),
        ({"class": "FILE:Missing"}, "has no class Missing; it has Echo, EchoKind"),
        ({"class": "missing.py:Echo"}, "there is no file"),
        ({"class": "no.such.module:X"}, "importing no.such.module failed"),
        ({"class": "toolz"}, "built in are plain, tools"),
        ({"class": "FILE:EchoKind", "config": {"size": 1}}, r"EchoKind\(size\) failed with TypeError"),
        ({"class": "FILE:Echo", "config": {"size": 1}}, "Echo is made with"),
        ({"klass": "plain"}, "give {class: ..., config: {...}}"),
        (3, "give {class"),
        ({"class": "plain", "config": {"x": 1}}, "there is no setting x; there are none"),
        ("tools", "needs actor_rollout_ref.rollout.multi_turn.tool_config_path, or config.tools"),
        ({"class": "tools", "config": {"tools": []}}, "at least one tool"),
        ({"class": "image_tools", "config": {"max_parallel_calls": 0}}, "max_parallel_calls=0: a whole number"),
        ({"class": "image_tools", "config": {"role": "assistant"}}, "role='assistant': use one of tool, user"),
        ({"class": "image_tools", "config": {"min_side": "28"}}, "min_side='28' must be a number"),
        (
            {"class": "tools", "config": {"tools": ["zoom"]}},
            r"config.tools\[0\]: there is no tool 'zoom'; built in are",
        ),
        ({"class": "tools", "config": {"tools": ["calculator", "calculator"]}}, "two tools calculator"),
        ({"class": "tools", "config": {"tools": [tool("calculator", digits=3)]}}, "has no setting digits; it has none"),
        ({"class": "tools", "config": {"tools": [tool("python", timout=3)]}}, "the tool python has no setting timout"),
        (
            {"class": "tools", "config": {"tools": [tool("search", top_k=3)]}},
            "no setting top_k; it has corpus_path, topk",
        ),
        ({"class": "tools", "config": {"tools": [tool("retriever", url="x")]}}, "no setting url; it has retrieval_ser"),
        ({"class": "tools", "config": {"tools": [{"class": "python"}]}}, r"tools\[0\]: a tool has no setting class"),
        ({"class": "tools", "config": {"tools": [{"class_name": "FILE:Upper"}]}}, "KeyError: 'mark'"),
        ({"class": "tools", "config": {"tools": [{"class_name": "FILE:Nothing"}]}}, r"Nothing\(config, tool_schema\)"),
        ({"class": "tools", "config": {"tool_config_path": "missing.yaml"}}, "No such file"),
    ],
)
def test_a_bad_entry_names_its_key(user_file: str, entry: Any, message: str) -> None:
    if isinstance(entry, dict):
        entry = eval(repr(entry).replace("FILE", user_file))
    with pytest.raises(ConfigError, match=message):
        environments(mine=entry).kind("mine")


def test_the_settings_of_a_run() -> None:
    rollout = {
        "agent": {"environments": {"math": {"class": "tools", "config": {"tools": ["calculator"]}}}},
        "multi_turn": {"max_parallel_calls": 3, "max_tool_response_length": 5, "tool_response_truncate_side": "right"},
    }
    settings = settings_of(build({"actor_rollout_ref": {"rollout": rollout}}))
    assert settings.limits == TurnLimits(max_parallel_calls=3, text=TextLimit(max_characters=5, side="right"))
    environment = Environments(settings).start(prompt(env_name="math"))
    assert texts(environment.step(call("calculator", expression="2 ** 20"))) == ["10485...(truncated)..."]
    with pytest.raises(ConfigError, match=r"multi_turn.format='gpt-oss'"):
        settings_of(build({"actor_rollout_ref": {"rollout": {"multi_turn": {"format": "gpt-oss"}}}}))
