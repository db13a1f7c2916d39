"""The tiny models: what Hugging Face loads from a folder, tokenizer, chat template, equal bytes for equal seeds."""

import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from vrl.models.tiny import SPECIAL_TOKENS, TINY_KINDS, TOOL_TOKENS, build_tiny_model

TEXTS = ["user\nWhich color is in the first image?\n", "assistant\nred\n", "assistant\nblue\n", "What is 3+4?"] * 5
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {kind: build_tiny_model(kind, root / kind, TEXTS, 0) for kind in TINY_KINDS}


@pytest.fixture(scope="module")
def processor(folders):
    return AutoProcessor.from_pretrained(folders["qwen2_5_vl"])


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_equal_seeds_give_equal_bytes_and_others_differ(kind, folders, tmp_path):
    state = torch.random.get_rng_state()
    torch.manual_seed(99)
    again = build_tiny_model(kind, tmp_path / "again", TEXTS, 0)
    torch.random.set_rng_state(state)
    names = sorted(path.name for path in folders[kind].iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        assert (folders[kind] / name).read_bytes() == (again / name).read_bytes(), name
    other = build_tiny_model(kind, tmp_path / "other", TEXTS, 1)
    assert (other / "model.safetensors").read_bytes() != (again / "model.safetensors").read_bytes()


def test_both_kinds_cut_text_into_the_same_ids(folders):
    text_model = AutoTokenizer.from_pretrained(folders["qwen2"])
    vision_model = AutoProcessor.from_pretrained(folders["qwen2_5_vl"]).tokenizer
    call = '<tool_call>\n{"a": [1, 2]}\n</tool_call>'
    text = f"<|im_start|>user\nWhich color?  3+40 =\n\n déjà vu 你好 {call}<|im_end|>\n"
    ids = text_model(text).input_ids
    assert ids == vision_model(text).input_ids
    assert text_model.decode(ids) == text


def test_special_tokens_tool_tokens_and_digits_are_single(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["qwen2"])
    for token in SPECIAL_TOKENS + TOOL_TOKENS + tuple("0123456789"):
        assert len(tokenizer(token).input_ids) == 1
    assert len(tokenizer("31415").input_ids) == 5
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    call = "<tool_call>\n{}\n</tool_call>"
    assert tokenizer.decode(tokenizer(call + "<|im_end|>").input_ids, skip_special_tokens=True) == call


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_size_ties_and_heads(kind, folders):
    loader = AutoModelForImageTextToText if kind == "qwen2_5_vl" else AutoModelForCausalLM
    model = loader.from_pretrained(folders[kind])
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert 0.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 5e6
    config = AutoConfig.from_pretrained(folders[kind])
    text = config.get_text_config()
    assert text.num_attention_heads % 2 == 0
    assert text.num_key_value_heads % 2 == 0
    tokenizer = AutoTokenizer.from_pretrained(folders[kind])
    assert text.vocab_size == len(tokenizer) <= 1024
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_the_vision_language_model_reads_the_image(folders, processor):
    model = AutoModelForImageTextToText.from_pretrained(folders["qwen2_5_vl"])
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which color?"}]}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    logits = []
    for color in ("red", "blue"):
        inputs = processor(text=[text], images=[Image.new("RGB", (84, 56), color)], return_tensors="pt")
        assert (inputs["input_ids"] == model.config.image_token_id).sum() == 6
        with torch.no_grad():
            logits.append(model(**inputs).logits[0, -1])
    assert not torch.allclose(logits[0], logits[1], atol=1e-3)
    assert logits[0].std() < 5


def test_template_of_a_plain_chat(processor):
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": [{"type": "text", "text": "See "}, {"type": "image", "image": "x"}]},
    ]
    assert processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYes<|im_end|>\n"
        "<|im_start|>user\nSee <|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert processor.apply_chat_template(messages[1:2], tokenize=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_template_of_tools_merges_results_in_one_user_turn(processor):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": [{"type": "image"}]},
        {"role": "assistant", "content": "Then", "tool_calls": [{"name": "f", "arguments": "{}"}]},
        {"role": "tool", "content": "three"},
    ]
    text = processor.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    system, rest = text.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nUse tools.\n\n# Tools\n\n")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in system
    one_call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert rest == (
        f"<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n{one_call}\n{one_call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
        "<tool_response>\n<|vision_start|><|image_pad|><|vision_end|>\n</tool_response><|im_end|>\n"
        '<|im_start|>assistant\nThen\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nthree\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_images_keep_their_size_between_the_limits(processor):
    for width, height, tokens in ((56, 56, 4), (84, 84, 9), (28, 28, 4)):
        buffer = io.BytesIO()
        Image.new("RGB", (width, height)).save(buffer, format="PNG")
        image = Image.open(io.BytesIO(buffer.getvalue()))
        inputs = processor(text=["<|vision_start|><|image_pad|><|vision_end|>"], images=[image], return_tensors="pt")
        assert inputs["input_ids"].shape[1] == tokens + 2


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="kind='llama'"):
        build_tiny_model("llama", tmp_path / "a", TEXTS, 0)
    with pytest.raises(ValueError, match="texts"):
        build_tiny_model("qwen2", tmp_path / "b", [], 0)
