"""The renderer of the tiny models."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from vrl.models.loading import load_policy
from vrl.models.renderer import HFRenderer, load_renderer
from vrl.protocol.errors import ConfigError, DataError
from vrl.protocol.ports import Renderer


@pytest.fixture(scope="module")
def vision(vision_folder: Path) -> HFRenderer:
    return load_renderer(vision_folder)


@pytest.fixture(scope="module")
def text(text_folder: Path) -> HFRenderer:
    return load_renderer(text_folder)


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _token_id(folder: Path, token: str) -> int:
    return AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(token)


def test_it_is_the_port(vision: HFRenderer) -> None:
    port: Renderer = vision
    assert port.pad_id not in port.eos_ids


def test_marks_become_one_placeholder_each(vision: HFRenderer, vision_folder: Path) -> None:
    ids = vision.render(_user("look <image> and\n<image>?"))
    image = _token_id(vision_folder, "<|image_pad|>")
    assert ids.count(image) == 2
    assert vision.decode(ids, keep_special=True) == (
        "<|im_start|>user\nlook <|vision_start|><|image_pad|><|vision_end|> and\n"
        "<|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n<|im_start|>assistant\n"
    )
    parts = [{"type": "text", "text": "look "}, {"type": "image", "image": b"x"}, {"type": "text", "text": " and\n"}]
    typed = _user([*parts, {"type": "image_url", "image_url": "y"}, {"type": "text", "text": "?"}])
    assert vision.render(typed) == ids


def test_the_models_own_words_are_no_marks(vision: HFRenderer, vision_folder: Path) -> None:
    messages = [*_user("hi"), {"role": "assistant", "content": "I write <image>"}, *_user("and?")]
    assert _token_id(vision_folder, "<|image_pad|>") not in vision.render(messages)


def test_expanded_length_is_that_of_the_processor(
    vision: HFRenderer, vision_folder: Path, png: Callable[..., bytes]
) -> None:
    images = [png(60, 90, 1), png(300, 300, 2)]
    ids = vision.render(_user("<image> or <image>"))
    expanded = vision.expand(ids, images)
    cache = vision.image_cache(1 << 20)
    assert cache is not None
    _, grids = cache.batch(images)
    assert grids is not None
    assert len(expanded) - len(ids) == int(grids.prod(dim=1).sum()) // 4 - 2
    processor = AutoProcessor.from_pretrained(vision_folder)
    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"
    prompt = f"<|im_start|>user\n{placeholder} or {placeholder}<|im_end|>\n<|im_start|>assistant\n"
    whole = processor(text=[prompt], images=[Image.open(io.BytesIO(data)) for data in images], return_tensors="pt")
    assert whole["input_ids"][0].tolist() == expanded


def test_positions_are_of_the_whole_row(vision: HFRenderer, text: HFRenderer, png: Callable[..., bytes]) -> None:
    image = png(56, 112)
    expanded = vision.expand(vision.render(_user("<image>")), [image])
    positions = vision.positions(expanded, [image])
    assert positions is not None
    assert len(positions) == len(expanded)
    assert all(len(place) == 3 for place in positions)
    assert positions[-1][0] < len(expanded) - 1  # an image takes fewer positions than tokens
    plain = vision.positions([1, 2], [])
    assert plain is not None
    assert plain.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert text.positions([1, 2], []) is None


def test_pixel_limits_hold_for_tokens_and_patches(vision_folder: Path, png: Callable[..., bytes]) -> None:
    renderer = load_renderer(vision_folder, 56 * 56, 56 * 112)
    image = png(400, 400)
    ids = renderer.render(_user("<image>"))
    assert len(renderer.expand(ids, [image])) == len(ids) + 3
    cache = renderer.image_cache(1 << 20)
    assert cache is not None
    assert cache.get(image)[1].tolist() == [[1, 4, 4]]
    with pytest.raises(ConfigError, match="leave no image size"):
        load_renderer(vision_folder, 1000, 500)


def test_marks_and_images_must_match(vision: HFRenderer, text: HFRenderer, png: Callable[..., bytes]) -> None:
    image = png(56, 56)
    with pytest.raises(DataError, match="1 image marks but 0 images"):
        vision.expand(vision.render(_user("<image>")), [])
    with pytest.raises(DataError, match="2 image marks but 1 images"):
        vision.expand(vision.render(_user("<image> <|image_pad|>")), [image])
    with pytest.raises(DataError, match="video token"):
        vision.expand(vision.render(_user("<image> <|video_pad|>")), [image])
    with pytest.raises(DataError, match="cannot be read"):
        vision.expand(vision.render(_user("<image>")), [image[:50]])
    with pytest.raises(DataError, match="text only"):
        text.expand(text.render(_user("<image>")), [image])


def test_special_ids(vision: HFRenderer, text: HFRenderer, vision_folder: Path) -> None:
    names = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
    assert set(vision.banned_ids) == {_token_id(vision_folder, name) for name in names}
    assert text.banned_ids == ()
    assert vision.eos_ids == (_token_id(vision_folder, "<|im_end|>"),)
    assert vision.pad_id == _token_id(vision_folder, "<|endoftext|>")


def test_every_end_token_of_the_generation_config_counts(text: HFRenderer, text_folder: Path, tmp_path: Path) -> None:
    text.save_pretrained(tmp_path)
    load_policy(text_folder, torch.float32).hf.save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    entries = json.loads(file.read_text(encoding="utf-8"))
    end = text.eos_ids[0]
    file.write_text(json.dumps({**entries, "eos_token_id": [text.pad_id, end]}), encoding="utf-8")
    assert load_renderer(tmp_path).eos_ids == (end, text.pad_id)
    file.unlink()
    assert load_renderer(tmp_path).eos_ids == (end,)


def test_an_answer_ends_with_the_end_token(text: HFRenderer) -> None:
    ids = text.answer_ids("red, 7")
    assert text.decode(ids[:-1], keep_special=True) == "red, 7"
    assert ids[-1] == text.eos_ids[0]


def test_text_round_trip(text: HFRenderer) -> None:
    ids = text.render(_user("naïve: a  b\n\t<image>"))
    assert "naïve: a  b\n\t<image>" in text.decode(ids)
    assert "<|im_start|>" not in text.decode(ids)
    assert text.decode([]) == ""


def test_a_saved_renderer_renders_the_same(vision: HFRenderer, vision_folder: Path, tmp_path: Path) -> None:
    load_policy(vision_folder, torch.float32).hf.save_pretrained(tmp_path)
    vision.save_pretrained(tmp_path)
    again = load_renderer(tmp_path)
    messages = _user("see <image>")
    assert again.render(messages) == vision.render(messages)
    assert (again.banned_ids, again.eos_ids, again.pad_id) == (vision.banned_ids, vision.eos_ids, vision.pad_id)


def test_folders_without_tokenizer_or_template(text_folder: Path, vision_folder: Path, tmp_path: Path) -> None:
    for folder in (text_folder, vision_folder):
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        with pytest.raises(DataError, match=f"{tmp_path} has no usable tokenizer"):
            load_renderer(tmp_path)
    (tmp_path / "config.json").write_bytes((text_folder / "config.json").read_bytes())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((text_folder / name).read_bytes())
    with pytest.raises(DataError, match="no chat template"):
        load_renderer(tmp_path)
    with pytest.raises(DataError, match="is no model folder"):
        load_renderer(tmp_path / "..")


def test_messages_that_the_template_cannot_take(text: HFRenderer, vision: HFRenderer) -> None:
    with pytest.raises(DataError, match="part of type 'audio'"):
        vision.render(_user([{"type": "audio"}]))
    refusing = HFRenderer(text._tokenizer, "{{ raise_exception('roles must alternate') }}", text.eos_ids, None)
    with pytest.raises(DataError, match=r"roles \['user'\]: roles must alternate"):
        refusing.render(_user("hi"))
