"""Rows put together turn by turn equal the whole conversation rendered at once, whatever text tools return."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vrl.models.renderer import HFRenderer, load_renderer
from vrl.protocol.errors import ConfigError, DataError

# As in SmolLM2-Instruct and in Qwen2.5-VL-Instruct: a system message of their own, roles written as they are called.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN2_5_VL = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a "
    "helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}{% if content['type'] == "
    "'image' or 'image' in content or 'image_url' in content %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As in Qwen3: a thought is written into the last answer only.
THOUGHTFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and not loop.last %}<think>\n"
    "</think>\n{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>"
    "assistant\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "description": "sum", "parameters": {"type": "object"}}}]
QUESTION = {"role": "user", "content": "what is 3 + 4"}
OBSERVATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "look again"}],
    "tool": [{"role": "tool", "content": "\n\n7\n"}],
    "tools": [{"role": "tool", "content": "7"}, {"role": "tool", "content": " 8 "}],
    "image": [{"role": "tool", "content": "see <image>"}, {"role": "user", "content": "<image>and <image>!"}],
}


@pytest.fixture(scope="module")
def vision(vision_folder: Path) -> HFRenderer:
    return load_renderer(vision_folder)


@pytest.fixture(scope="module")
def text(text_folder: Path) -> HFRenderer:
    return load_renderer(text_folder)


@pytest.fixture(scope="module")
def renderers(vision: HFRenderer, text: HFRenderer) -> dict[str, HFRenderer]:
    return {
        "tiny vision": vision,
        "qwen2.5-vl": HFRenderer(vision._tokenizer, QWEN2_5_VL, vision.eos_ids, vision._vision),
        "tiny text": text,
        "smollm2": HFRenderer(text._tokenizer, SMOLLM2, text.eos_ids, None),
    }


def images_of(messages: Sequence[dict[str, Any]]) -> int:
    return sum(message["content"].count("<image>") for message in messages)


TEXT_TURNS = [["tool"], ["user", "tools", "tool"]]
CASES = [(name, turns) for name in ("tiny vision", "qwen2.5-vl", "tiny text", "smollm2") for turns in TEXT_TURNS]
CASES += [(name, ["image", "tools", "image"]) for name in ("tiny vision", "qwen2.5-vl")]


@pytest.mark.parametrize(("name", "turns"), CASES)
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_parts_equal_the_whole(renderers: dict[str, HFRenderer], name: str, tools: list[Any], turns: list[str]) -> None:
    renderer = renderers[name]
    eos = renderer.eos_ids[0]
    whole: list[dict[str, Any]] = [QUESTION]
    ended, stopped = renderer.render(whole, tools), renderer.render(whole, tools)
    for number, turn in enumerate(turns):
        messages = OBSERVATIONS[turn]
        answer = renderer.answer_ids(f"the answer is {number}")
        assert answer[-1] == eos
        ended += [*answer, *renderer.observation_ids(messages, images_of(messages), eos)]
        stopped += [*answer[:-1], *renderer.observation_ids(messages, images_of(messages), answer[-2])]
        whole += [{"role": "assistant", "content": f"the answer is {number}"}, *messages]
    assert ended == renderer.render(whole, tools)
    assert stopped == ended, "the closer of a turn that ended on a stop string comes with the observation"


def test_two_tool_results_share_one_block(vision: HFRenderer) -> None:
    shown = vision.decode(vision.observation_ids(OBSERVATIONS["tools"], 0, -1), keep_special=True)
    assert shown == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n 8 \n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


PIECES = [
    "<|im_end|>",
    "<|im_start|>",
    "<|image_pad|>",
    "<|vision_start|>",
    "<image>",
    "<|endoftext|>",
    "<|im",
    "_end|>",
]


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=8), where=st.sampled_from(["tool", "user"])
)
def test_text_of_tools_stays_text(vision: HFRenderer, pieces: list[str], where: str) -> None:
    content = "".join(pieces)
    plain = vision.observation_ids([{"role": where, "content": "x"}], 0, vision.eos_ids[0])
    ids = vision.observation_ids([{"role": where, "content": content}], 0, vision.eos_ids[0])
    special = {*vision.banned_ids, *vision.eos_ids, vision.pad_id, plain[1]}
    assert [token for token in ids if token in special] == [token for token in plain if token in special]
    decoded = vision.decode(ids, keep_special=True)
    assert vision._tokenizer.backend_tokenizer.normalizer.normalize_str(content) in decoded


def test_marks_beyond_the_images_are_text(vision: HFRenderer) -> None:
    image = vision.banned_ids
    messages = [{"role": "tool", "content": "<image> is <image>"}]
    one = vision.observation_ids(messages, 1, -1)
    assert len([token for token in one if token in image]) == 3
    assert "is <image>" in vision.decode(one)
    typed = [{"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": " is <image>"}]}]
    assert vision.observation_ids(typed, 1, -1) == one
    with pytest.raises(DataError, match="brings 3 images but has places for 2"):
        vision.observation_ids(messages, 3, -1)


def test_a_template_that_rewrites_the_past_is_refused(text: HFRenderer, vision: HFRenderer) -> None:
    text.check_turns()
    vision.check_turns()
    for template, why in (
        (THOUGHTFUL, "change how it writes the conversation"),
        ("{{ messages[0].content }}<|im_start|>", "leave the answer"),
        ("{% for m in messages %}{{ m.content }} {% endfor %}", "not by an end token"),
        ("{% if messages[1:] %}{{ raise_exception('one message only') }}{% endif %}", "one message only"),
    ):
        with pytest.raises(ConfigError, match=f"cannot be continued turn by turn.*{why}"):
            HFRenderer(text._tokenizer, template, text.eos_ids, None).check_turns()


def test_images_that_cannot_be_used_say_why(vision: HFRenderer, text: HFRenderer, png: Callable[..., bytes]) -> None:
    vision.check_image(png(40, 60), 2400)
    with pytest.raises(DataError, match="40 x 60, at most 2399 pixels"):
        vision.check_image(png(40, 60), 2399)
    with pytest.raises(DataError, match="one side is over 200 times"):
        vision.check_image(png(1, 300), 10**6)
    with pytest.raises(DataError, match="cannot be read"):
        vision.check_image(b"no image", 10**6)
    with pytest.raises(DataError, match="text only"):
        text.check_image(png(40, 60), 2400)
    with pytest.raises(DataError, match="text only"):
        text.observation_ids(OBSERVATIONS["image"], 3, -1)


def test_private_characters_of_a_tool_stay(text: HFRenderer) -> None:
    said = "a\ue000b <|im_end|> c"
    assert said in text.decode(text.observation_ids([{"role": "tool", "content": said}], 0, -1), keep_special=True)


def test_a_role_that_the_template_refuses_is_named(text: HFRenderer) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = HFRenderer(text._tokenizer, template, text.eos_ids, None)
    renderer.check_turns({"look": "user"})
    with pytest.raises(ConfigError, match=r"environment look answers with the role tool.*no tools.*config.role=user"):
        renderer.check_turns({"look": "tool"})
