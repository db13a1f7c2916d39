"""The value model: values against hidden states, images, saving and loading."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from vrl.models.loading import load_policy, load_value_model
from vrl.models.packing import PackedBatch, pack
from vrl.models.renderer import load_renderer
from vrl.protocol.errors import DataError

_IDS = torch.arange(20, 42)
_OFFSETS = torch.tensor([0, 9, 10, 22])
_SHOW_VALUES = """
import sys, torch
from vrl.models.loading import load_value_model
from vrl.models.packing import pack
for folder in sys.argv[1:]:
    values = load_value_model(folder, torch.float32)(pack(torch.arange(20, 42), torch.tensor([0, 9, 10, 22])))
    sys.stdout.write("".join(v.hex() + " " for v in values.tolist()))
"""


def _with_image(folder: Path, image: bytes) -> PackedBatch:
    renderer = load_renderer(folder)
    ids = renderer.expand(renderer.render([{"role": "user", "content": "<image> value?"}]), [image])
    cache = renderer.image_cache(1 << 20)
    assert cache is not None
    pixels, grids = cache.batch([image])
    return pack(
        torch.tensor(ids),
        torch.tensor([0, len(ids)]),
        positions=torch.tensor(renderer.positions(ids, [image])),
        pixel_values=pixels,
        image_grid_thw=grids,
    )


def test_a_value_is_the_head_at_the_token_before(text_folder: Path) -> None:
    model = load_value_model(text_folder, torch.float32)
    values = model(pack(_IDS, _OFFSETS))
    plain = AutoModel.from_pretrained(text_folder, dtype=torch.float32)
    for begin, end in ((0, 9), (9, 10), (10, 22)):
        hidden = plain(_IDS[None, begin:end]).last_hidden_state[0]
        wanted = torch.cat([torch.zeros(1), model.value_head(hidden[:-1])[:, 0]])
        torch.testing.assert_close(values[begin:end], wanted, rtol=1e-5, atol=1e-5)
    values.sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_the_head_computes_in_float32(text_folder: Path) -> None:
    model = load_value_model(text_folder, torch.bfloat16)
    assert model(pack(_IDS, _OFFSETS)).dtype == torch.float32
    assert model.value_head.weight.dtype == torch.float32


def test_images_change_the_values(vision_folder: Path, png: Callable[..., bytes]) -> None:
    model = load_value_model(vision_folder, torch.float32, gradient_checkpointing=True)
    first, second = (model(_with_image(vision_folder, png(56, 56, seed))) for seed in (1, 2))
    assert (first - second).abs().max() > 1e-3
    first.sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_saved_models_give_the_same_values_in_a_new_process(
    text_folder: Path, vision_folder: Path, tmp_path: Path
) -> None:
    wanted = []
    for folder in (text_folder, vision_folder):
        model = load_value_model(folder, torch.float32)
        with torch.no_grad():
            for parameter in model.value_head.parameters():
                parameter += 0.5
        weights = {name: p.detach().clone() for name, p in model.hf_named_parameters()}
        model.save_pretrained(tmp_path / folder.name, weights)
        wanted += model(pack(_IDS, _OFFSETS)).tolist()
    saved = [str(tmp_path / folder.name) for folder in (text_folder, vision_folder)]
    command = [sys.executable, "-c", _SHOW_VALUES, *saved]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [float.fromhex(v) for v in shown.stdout.split()] == wanted


def test_a_new_head_is_announced_and_equal_on_all_ranks(
    text_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="vrl.models.loading"):
        torch.manual_seed(1)
        first = load_value_model(text_folder, torch.float32)
        assert "plain backbone" in caplog.text
        torch.manual_seed(2)
        second = load_value_model(text_folder, torch.float32)
        torch.testing.assert_close(first.value_head.weight, second.value_head.weight, rtol=0, atol=0)
        first.save_pretrained(tmp_path)
        caplog.clear()
        load_value_model(tmp_path, torch.float32)
        assert "plain backbone" not in caplog.text


def test_half_a_value_model_is_refused(text_folder: Path, tmp_path: Path) -> None:
    load_value_model(text_folder, torch.float32).save_pretrained(tmp_path)
    head = load_file(tmp_path / "value_head.safetensors")
    (tmp_path / "value_head.safetensors").unlink()
    with pytest.raises(DataError, match=r"value_head\.safetensors is missing"):
        load_value_model(tmp_path, torch.float32)
    save_file({"value_head.weight": torch.zeros(1, 3)}, tmp_path / "value_head.safetensors")
    with pytest.raises(DataError, match="no head of a backbone of width 128"):
        load_value_model(tmp_path, torch.float32)
    save_file(head, tmp_path / "value_head.safetensors")
    (tmp_path / "value_model.json").write_text(json.dumps({"format": "other"}), encoding="utf-8")
    with pytest.raises(DataError, match="format 'other'"):
        load_value_model(tmp_path, torch.float32)


def test_missing_and_unexpected_weights_are_refused(text_folder: Path, tmp_path: Path) -> None:
    load_policy(text_folder, torch.float32).hf.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "model.adapter.weight": torch.zeros(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"no place for: .*adapter"):
        load_value_model(tmp_path, torch.float32)
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"lacks weights.*norm\.weight"):
        load_value_model(tmp_path, torch.float32)
    with pytest.raises(DataError, match=r"lacks weights.*norm\.weight"):
        load_policy(tmp_path, torch.float32)
