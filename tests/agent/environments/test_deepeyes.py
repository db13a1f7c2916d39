"""Environments with DeepEyes' interface: constructors, resets and observations as its tools have them."""

from typing import Any

import pytest
from PIL import Image

from tests.agent.episodes import opened, png, prompt, texts
from vrl.agent.environments.deepeyes import DeepEyesKind, ToolBase, read_observation
from vrl.agent.environments.observations import CUT_MARK, TextLimit
from vrl.agent.environments.registry import Environments, EnvironmentSettings
from vrl.agent.environments.tool_calls import TurnLimits
from vrl.agent.tools.types import ToolFailure
from vrl.protocol.errors import ConfigError


class VisualToolbox(ToolBase):
    """The way DeepEyes' visual toolbox is written."""

    name = "visual_toolbox_test"

    def __init__(self, _name: Any, _desc: Any, _params: Any, **kwargs: Any) -> None:
        super().__init__(name=self.name)
        self.images: list[Image.Image] | None = None

    def reset(self, raw_prompt: Any, multi_modal_data: Any, origin_multi_modal_data: Any, **kwargs: Any) -> None:
        self.chat_history = raw_prompt
        self.options = kwargs
        self.images = origin_multi_modal_data["image"]
        multi_modal_data["image"].clear()
        raw_prompt.clear()

    def execute(self, action_string: str, **kwargs: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        if "<answer>" in action_string:
            return "", 0.25, True, {}
        if "<tool_call>" not in action_string:
            return "", 0.0, True, {}
        if "odd" in action_string:
            return "nothing", 0.0  # pyright: ignore[reportReturnType]
        assert self.images is not None
        chat = [{"role": "user", "content": "<tool_response><image></tool_response>"}]
        crop = self.images[0].crop((0, 0, 30, 40))
        return {"chat": chat, "multi_modal_data": {"image": [crop]}}, 0.5, False, {"status": "success"}


def test_an_episode() -> None:
    environments = Environments(EnvironmentSettings(environments={"toolbox": f"{__file__}:VisualToolbox"}))
    row = prompt(png(100, 80), env_name="toolbox", difficulty=3)
    environment = environments.start(row)
    result = environment.step("<tool_call>...</tool_call>")
    assert (result.reward, result.done, dict(result.info)) == (0.5, False, {"status": "success"})
    assert result.observation is not None
    assert result.observation.messages[0]["content"] == "<tool_response><image></tool_response>"
    assert opened(result.observation.images[0]).size == (30, 40)
    with pytest.raises(ToolFailure, match=r"VisualToolbox.execute must return \(observation, reward, done, info\)"):
        environment.step("<tool_call>odd")
    last = environment.step("<answer>4</answer>")
    assert (last.observation, last.reward, last.done) == (None, 0.25, True)
    assert row.messages  # the tool emptied its own copy
    again = environments.start(row).step("<tool_call>")
    assert again.observation is not None
    environments.close()


def test_a_class_that_cannot_be_made_is_a_bad_setting() -> None:
    with pytest.raises(ConfigError, match=r"my_env: VisualToolbox.*sise"):
        DeepEyesKind(
            type("V", (VisualToolbox,), {"__init__": lambda self, size: None, "__name__": "VisualToolbox"}),
            {"sise": 1},
            "my_env: VisualToolbox",
            TextLimit(),
        )


@pytest.mark.parametrize(
    ("observation", "messages"),
    [
        ("", None),
        (None, None),
        ([], None),
        ({}, None),
        ("plain", [("user", "plain")]),
        ("\n<|im_start|>user\nlook<|im_end|>\n<|im_start|>assistant\n", [("user", "look")]),
        ("<|im_end|>\n<|im_start|>tool\na<|im_end|><|im_start|>tool\nb<|im_end|>", [("tool", "a"), ("tool", "b")]),
        ([{"role": "tool", "content": "x"}], [("tool", "x")]),
        ({"prompt": "p"}, [("user", "p")]),
        ("Invalid action: <image>", [("user", "Invalid action: <image >")]),
        ([{"role": "tool", "content": "no <image>"}], [("tool", "no <image >")]),
    ],
)
def test_forms_of_observations(observation: Any, messages: Any) -> None:
    read = read_observation(observation, TextLimit())
    assert (read and [(m["role"], m["content"]) for m in read.messages]) == messages


def test_marks_and_images_agree() -> None:
    image = Image.new("RGB", (30, 30))
    with_images = {"multi_modal_data": {"image": [image, image]}}
    read = read_observation({"prompt": "two", **with_images}, TextLimit())
    assert read is not None
    assert read.messages[0]["content"] == "<image><image>two"
    parts = [{"type": "image"}, {"type": "text", "text": "an <image> in words"}, {"type": "image"}]
    read = read_observation({"chat": [{"role": "user", "content": parts}], **with_images}, TextLimit())
    assert read is not None
    assert read.messages[0]["content"].count("<image>") == 2
    assert read_observation(with_images, TextLimit()) is not None
    with pytest.raises(ValueError, match="3 marks <image> for 2 images"):
        read_observation({"prompt": "<image><image><image>", **with_images}, TextLimit())
    with pytest.raises(ValueError, match="1 marks <image> for 0 images"):
        read_observation([{"role": "user", "content": [{"type": "image"}]}], TextLimit())


def test_an_image_that_cannot_be_read_becomes_a_text() -> None:
    broken = [b"\x89PNG\r\n\x1a\nxxxx", Image.new("RGB", (0, 3)), Image.new("RGB", (9, 9))]
    seen = read_observation({"prompt": "a<image>b<image>c<image>", "multi_modal_data": {"image": broken}}, TextLimit())
    assert seen is not None
    assert len(seen.images) == 1
    parts = seen.messages[0]["content"]
    assert [part["type"] for part in parts] == ["text", "text", "text", "text", "text", "image"]
    assert all("[image left out" in parts[number]["text"] for number in (1, 3))


@pytest.mark.parametrize(
    ("side", "cut"),
    [
        ("left", f"{CUT_MARK}<image><image>ij<image>klmn"),
        ("right", f"abcd<image>ef{CUT_MARK}<image><image>"),
        ("middle", f"abc{CUT_MARK}<image><image><image>lmn"),
    ],
)
def test_long_texts_are_cut_and_images_stay(side: Any, cut: str) -> None:
    images = {"multi_modal_data": {"image": [Image.new("RGB", (9, 9))] * 3}}
    observation = {"prompt": "abcd<image>efgh<image>ij<image>klmn", **images}
    read = read_observation(observation, TextLimit(max_characters=6, side=side))
    assert read is not None
    assert read.messages[0]["content"] == cut
    whole = read_observation(observation, TextLimit(max_characters=14, side=side))
    assert whole is not None
    assert whole.messages[0]["content"] == observation["prompt"]


def test_the_limit_of_a_run_holds() -> None:
    limits = TurnLimits(text=TextLimit(max_characters=4, side="right"))
    entries = {"loud": {"class": f"{__file__}:Loud"}}
    environment = Environments(EnvironmentSettings(environments=entries, limits=limits)).start(prompt(env_name="loud"))
    assert texts(environment.step("hey")) == [f"hey {CUT_MARK}"]


class Loud(ToolBase):
    """Says a lot."""

    name = "loud"

    def execute(self, action_string: str, **kwargs: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        return f"{action_string} " * 9, 0.0, False, {}
