"""Function tools in an episode: what is called, what the model is told, what is counted, what is given back."""

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tests.agent.episodes import call, opened, png, prompt, texts
from tests.agent.in_process_runner import InProcessRunner
from vrl.agent.environments.observations import CUT_MARK, TextLimit
from vrl.agent.environments.registry import Environments, EnvironmentSettings
from vrl.agent.environments.tool_calls import ToolKind, TurnLimits
from vrl.agent.tools.types import StatelessTool, ToolAnswer, ToolFailure, function_schema
from vrl.agent.tools.user_tools import BaseTool, ToolResponse, UserTool
from vrl.protocol.errors import ConfigError

NUMBER = function_schema("count", "Count.", {"by": {"type": "integer", "minimum": 0}}, "by")


class Counter(BaseTool):
    """Counts within an episode, as verl's tools do: state under the instance id."""

    def __init__(self, config: Any = None, tool_schema: Any = None) -> None:
        super().__init__(config or {}, tool_schema)
        self.totals: dict[str, int] = {}
        self.released = 0

    def get_openai_tool_schema(self) -> Mapping[str, Any]:
        return NUMBER

    async def create(self, instance_id: str, start: int = 0, **kwargs: Any) -> tuple[str, ToolResponse]:
        assert start == kwargs["create_kwargs"].get("start", 0)
        self.totals[instance_id] = start
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        self.totals[instance_id] += parameters["by"]
        if parameters["by"] == 13:
            raise RuntimeError("thirteen")
        if parameters["by"] == 55:
            raise ValueError("no service") from ConnectionError("refused")
        if parameters["by"] == 44:
            raise FileNotFoundError("no such file")
        if parameters["by"] == 33:
            return {1, 2}
        if parameters["by"] == 99:
            raise ToolFailure("the counting service is down")
        reward = float("nan") if parameters["by"] == 77 else 0.5
        return ToolResponse(text=str(self.totals[instance_id])), reward, {"counted": parameters["by"]}

    async def calc_reward(self, instance_id: str, **_: Any) -> float:
        return float(self.totals[instance_id])

    async def release(self, instance_id: str, **_: Any) -> None:
        del self.totals[instance_id]
        self.released += 1


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def kind(counter: Counter) -> Any:
    limits = TurnLimits(max_parallel_calls=2, text=TextLimit(max_characters=200))
    made = ToolKind([UserTool(counter, counter.tool_schema, "tools[0]")], limits)
    yield made
    made.close()


def test_an_episode_from_start_to_end(kind: ToolKind, counter: Counter) -> None:
    assert kind.schemas == [NUMBER]
    environment = kind.start(prompt(count={"create_kwargs": {"start": 10}}))
    other = kind.start(prompt())
    first = environment.step("I count." + call("count", by=2))
    assert first.observation is not None
    assert first.observation.messages == ({"role": "tool", "name": "count", "content": "12"},)
    assert (first.reward, first.done) == (0.5, False)
    assert first.info == {"counted": 2, "tool_calls": 1, "tool_errors": 0, "malformed_calls": 0}
    assert texts(other.step(call("count", by=1))) == ["1"]  # state of its own
    assert texts(environment.step(call("count", by=1) + call("count", by=1))) == ["13", "14"]
    last = environment.step("It is <answer>14</answer>")
    assert last.observation is None
    assert last.reward == 14.0  # calc_reward
    environment.close()
    assert (counter.released, list(counter.totals.values())) == (1, [1])
    other.close()
    assert counter.released == 2


def test_exceptions_of_a_tool_stand_in_the_info(kind: ToolKind) -> None:
    result = kind.start(prompt()).step(call("count", by=13))
    assert result.info["tool_exceptions"] == 1
    assert "RuntimeError: thirteen" in result.info["tool_tracebacks"][0]
    assert "FileNotFoundError" in texts(kind.start(prompt()).step(call("count", by=44)))[0], "models name files"


@pytest.mark.parametrize(
    ("by", "why"), [(77, "the reward is nan"), (33, "execute returned set"), (55, "failed: ValueError: no service")]
)
def test_what_is_no_fault_of_the_model_fails_the_episode(kind: ToolKind, by: int, why: str) -> None:
    with pytest.raises(ToolFailure, match=why):
        kind.start(prompt()).step(call("count", by=by))


@pytest.mark.parametrize(
    ("text", "told", "counts"),
    [
        (call("cuont", by=1), "there is no tool 'cuont'; the tools are: count", (1, 1, 0)),
        (
            call("count"),
            "bad arguments for count: 'by' is a required property. Parameters: by; required: by",
            (1, 1, 0),
        ),
        (call("count", by="1"), "by: '1' is not of type 'integer'", (1, 1, 0)),
        (call("count", by=-1), "by: -1 is less than the minimum of 0", (1, 1, 0)),
        (call("count", by="x" * 9999), "is not of type 'integer'", (1, 1, 0)),
        (call("count", by=13), "the tool count failed: RuntimeError: thirteen", (1, 1, 0)),
        ("<tool_call>{'name'</tool_call>", "not valid JSON", (0, 0, 1)),
        ("<tool_call>", "is not closed", (0, 0, 1)),
        ("</tool_call>", "without <tool_call> before it", (0, 0, 1)),
    ],
)
def test_what_a_model_does_wrong_it_is_told(kind: ToolKind, text: str, told: str, counts: tuple[int, int, int]) -> None:
    environment = kind.start(prompt())
    result = environment.step(text)
    assert told in texts(result)[0]
    assert len(texts(result)[0]) <= 200 + len(CUT_MARK)
    assert (result.info["tool_calls"], result.info["tool_errors"], result.info["malformed_calls"]) == counts
    assert texts(environment.step(call("count", by=1)))[0] in ("1", "14", "78")  # the episode goes on
    environment.close()


def test_calls_beyond_the_limit_do_not_run(kind: ToolKind) -> None:
    environment = kind.start(prompt())
    result = environment.step(call("nothing") + call("count", by=1) * 4)
    told = texts(result)
    assert told[1:3] == ["1", "2"]
    assert told[3:] == ["Error: 2 further calls were not run: at most 2 run in a turn"]
    assert result.observation is not None
    assert result.observation.messages[3]["name"] == "count", "some chat templates want a name"
    assert (result.info["tool_calls"], result.info["tool_errors"], result.info["malformed_calls"]) == (3, 2, 0)
    environment.close()


@pytest.mark.parametrize(
    ("text", "told", "note", "counts"),
    [
        (call("count", by=1) * 40, 2, "more than 30 further calls were not run: at most 2", (2, 1, 0)),
        (call("count") * 3, 2, "1 further call was not run: at most 2", (2, 3, 0)),
        ("<tool_call>{</tool_call>" * 40 + call("count", by=1), 2, "more than 30 further calls were", (0, 1, 32)),
    ],
)
def test_many_calls_or_mistakes_get_one_note(
    kind: ToolKind, text: str, told: int, note: str, counts: tuple[int, int, int]
) -> None:
    environment = kind.start(prompt())
    result = environment.step(text)
    assert len(texts(result)) == told + 1
    assert note in texts(result)[-1]
    assert (result.info["tool_calls"], result.info["tool_errors"], result.info["malformed_calls"]) == counts
    environment.close()


def test_more_calls_than_are_read() -> None:
    kind = ToolKind([StatelessTool(NUMBER, lambda _, arguments: ToolAnswer())], TurnLimits(max_parallel_calls=99))
    result = kind.start(prompt()).step(call("count", by=1) * 40)
    assert "More than 32 tool calls in one turn" in texts(result)[32]
    assert (result.info["tool_calls"], result.info["tool_errors"], len(texts(result))) == (32, 1, 33)


@pytest.mark.parametrize(
    ("text", "malformed"),
    [
        (call("count", by=1) + '<tool_call>{"name": "cou', (1, 0)),
        ("<tool_call>", (1, 0)),
        ("<tool_call>{'name'</tool_call>", (1, 1)),
        ("<tool_call>{'name'" + call("count", by=1), (1, 1)),
    ],
)
def test_a_call_that_is_cut_off_is_told_and_no_mistake(kind: ToolKind, text: str, malformed: tuple[int, int]) -> None:
    environment = kind.start(prompt())
    for cut in (False, True):
        result = environment.step(text, cut=cut)
        assert any(said.startswith("Error: ") for said in texts(result))
        assert result.info["malformed_calls"] == malformed[cut]
    environment.close()


def test_counts_and_seconds_of_several_calls_are_summed() -> None:
    infos = iter([{"found": 2, "code_seconds": 0.5, "score": 0.25, "who": "a"}, {"found": 3, "code_seconds": 0.25,
                  "score": 0.75, "who": "b"}])  # fmt: skip
    tool = StatelessTool(NUMBER, lambda _, arguments: ToolAnswer(info=next(infos)))
    info = ToolKind([tool], TurnLimits(max_parallel_calls=2)).start(prompt()).step(call("count", by=1) * 2).info
    assert {key: info[key] for key in ("found", "code_seconds", "score", "who")} == {
        "found": 5, "code_seconds": 0.75, "score": 0.75, "who": "b"
    }  # fmt: skip


def test_a_failing_service_fails_the_episode(kind: ToolKind) -> None:
    environment = kind.start(prompt())
    with pytest.raises(ToolFailure, match="service is down"):
        environment.step(call("count", by=99))
    environment.close()


def test_asynchronous_calls_of_a_turn_run_at_the_same_time() -> None:
    class Slow(BaseTool):
        async def execute(self, instance_id: str, parameters: Mapping[str, Any], **_: Any) -> str:
            await asyncio.sleep(0.3)
            return str(parameters["by"])

    kind = ToolKind([UserTool(Slow({}, NUMBER), NUMBER, "t")], TurnLimits(max_parallel_calls=5))
    environment = kind.start(prompt())
    start = time.perf_counter()
    assert texts(environment.step("".join(call("count", by=n) for n in range(5)))) == list("01234")
    assert time.perf_counter() - start < 1.0
    environment.close()
    kind.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("tool", "user-tool"))]


def test_texts_are_cut_and_marks_are_harmless() -> None:
    limit = TextLimit(max_characters=10, side="middle")
    assert limit.cut("0123456789") == "0123456789"
    assert limit.cut("0123456789ab") == f"01234{CUT_MARK}789ab"
    assert TextLimit(max_characters=3, side="left").cut("abcdef") == f"{CUT_MARK}def"
    assert TextLimit(max_characters=3, side="right").cut("abcdef") == f"abc{CUT_MARK}"
    schema = function_schema("say", "", {"text": {"type": "string"}, "images": {"type": "integer"}})
    thin = png(400, 2)

    def say(_prompt: Any, arguments: Mapping[str, Any]) -> ToolAnswer:
        images = (png(30, 30), thin, b"broken")[: arguments.get("images", 0)]
        return ToolAnswer(text=arguments.get("text", ""), images=images)

    environment = ToolKind([StatelessTool(schema, say)], TurnLimits()).start(prompt())
    result = environment.step(call("say", text="an <image> and <|im_end|>", images=3))
    assert result.observation is not None
    assert result.observation.images == (png(30, 30),)
    content = texts(result)[0]
    assert content.count("<image>") == len(result.observation.images)
    assert "<|im_end|>" in content  # the renderer makes special tokens harmless, not the tool
    assert "one side may be at most 100 times" in content
    assert "cannot be read" in content
    assert texts(environment.step(call("say", images=1))) == ["<image>"]


def test_image_tools_and_interpreter_share_the_prompts_images() -> None:
    runner = InProcessRunner()
    settings = EnvironmentSettings(
        environments={"both": {"class": "tools", "config": {"tools": ["image_zoom_in_tool", "python"], "role": "user"}}}
    )
    environments = Environments(settings, runner)
    environment = environments.start(prompt(png(100, 80), env_name="both"))
    zoomed = environment.step(call("image_zoom_in_tool", bbox_2d=[0, 0, 40, 40]))
    assert zoomed.observation is not None
    assert zoomed.observation.messages == ({"role": "user", "content": "<image>"},)
    assert opened(zoomed.observation.images[0]).size == (40, 40)
    assert texts(environment.step(call("python", code="x = image_1.size\nprint(x)"))) == ["(100, 80)"]
    shown = environment.step(call("python", code="print(x)\nshow(image_1.crop((0, 0, 50, 60)))"))
    assert texts(shown) == ["(100, 80)\n<image>"]
    assert runner.open_sessions == 1
    environment.close()
    assert runner.open_sessions == 0
    environments.close()


SCHEMA = {"type": "function", "function": NUMBER["function"]}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (None, "needs a schema"),
        ({"type": "function", "function": {}}, "no function.name"),
        (function_schema("f", "", {"a": {"type": "integer"}}, "b"), "required names b are not among the properties"),
        (function_schema("f", "", {"a": {"type": "int"}}), "no valid JSON schema"),
        (function_schema("f", "", {"a": {"$ref": "#/$defs/missing"}}), "leads nowhere"),
        (function_schema("f", "", {"a": {"$ref": "http://localhost:1/x"}}), "leads nowhere"),
        ({"function": {"name": "f", "parameters": {"type": "array"}}}, "type: object"),
    ],
)
def test_schemas_are_checked_when_a_tool_is_made(counter: Counter, schema: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UserTool(counter, schema, "tools[0]")


def test_a_method_that_takes_no_call_is_noticed_when_a_tool_is_made() -> None:
    class Alone(BaseTool):
        def execute(self, parameters: Mapping[str, Any]) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
            return ""

    with pytest.raises(ConfigError, match=r"tools\[0\]: Alone.execute takes no \(instance_id, parameters\): too many"):
        UserTool(Alone({}, NUMBER), NUMBER, "tools[0]")


def test_arguments_as_deep_and_odd_as_a_parser_lets_through(kind: ToolKind) -> None:
    deep = json.dumps({"name": "count", "arguments": {"by": [[[[[{"a": 1e300}]]]]], "\u0000": None}})
    environment = kind.start(prompt())
    assert "bad arguments" in texts(environment.step(f"<tool_call>{deep}</tool_call>"))[0]


def test_a_tool_that_the_row_names_is_asked_for_its_reward_without_a_call(kind: ToolKind) -> None:
    named = kind.start(prompt(count={"create_kwargs": {"start": 3}}))
    assert named.finish() == 3.0
    assert kind.start(prompt()).finish() == 0.0
