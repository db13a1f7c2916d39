"""What is loaded, and what is refused with a reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vrl.models.loading import HeadCounts, head_counts, load_policy, load_value_model, read_config
from vrl.protocol.errors import ConfigError, DataError


def _config_folder(folder: Path, kind: str, **entries: Any) -> Path:
    config = AutoConfig.for_model(kind, **entries)
    config.save_pretrained(folder)
    return folder


def test_head_counts(text_folder: Path, vision_folder: Path) -> None:
    assert head_counts(text_folder) == HeadCounts(query=4, key_value=2, vision=None)
    assert head_counts(vision_folder) == HeadCounts(query=4, key_value=2, vision=4)


def test_folders_that_are_no_models(tmp_path: Path, text_folder: Path) -> None:
    with pytest.raises(DataError, match=f"{tmp_path} is no model folder"):
        load_policy(tmp_path, torch.float32)
    with pytest.raises(DataError, match="neither a model folder nor a model that can be fetched"):
        read_config(tmp_path / "missing")
    (tmp_path / "config.json").write_bytes((text_folder / "config.json").read_bytes())
    with pytest.raises(DataError, match=f"weights of {tmp_path} cannot be read"):
        load_policy(tmp_path, torch.float32)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of"}), encoding="utf-8")
    with pytest.raises(ConfigError, match="unheard_of"):
        load_policy(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("kind", "entries", "message"),
    [
        ("t5", {}, "encoder-decoder"),
        ("gemma2", {}, "changes its logits"),
        ("qwen2_vl", {}, "qwen2_5_vl only"),
        ("lfm2", {"full_attn_idxs": [2]}, "mix packed rows"),
        ("bert", {"architectures": ["BertForMaskedLM"]}, "no causal language model"),
    ],
)
def test_models_that_would_be_wrong_are_refused(
    kind: str, entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_policy(_config_folder(tmp_path, kind, **entries), torch.float32)


def test_recurrent_models_are_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="would mix packed rows"):
        load_policy(tmp_path, torch.float32)


def test_value_models_refuse_the_same(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="encoder-decoder"):
        load_value_model(_config_folder(tmp_path, "t5"), torch.float32)


def test_overrides_reach_the_config(text_folder: Path, vision_folder: Path) -> None:
    plain = load_policy(vision_folder, torch.float32, override_config={"rms_norm_eps": 1e-3})
    assert plain.hf.config.get_text_config().rms_norm_eps == 1e-3
    nested = load_policy(vision_folder, torch.float32, override_config={"text_config": {"rms_norm_eps": 2e-3}})
    assert nested.hf.config.get_text_config().rms_norm_eps == 2e-3
    attention = load_policy(text_folder, torch.float32, override_config={"attn_implementation": "flash_attention_2"})
    assert attention.hf.config._attn_implementation == "vrl_varlen"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"rms_norm_epsilon": 1.0}, "did you mean 'rms_norm_eps'"),
        ({"attn_implementation": "fastest"}, "attention 'fastest' is unknown"),
    ],
)
def test_unknown_overrides_are_refused(text_folder: Path, override: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_policy(text_folder, torch.float32, override_config=override)
