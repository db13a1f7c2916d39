"""The reward model: scores against transformers' own classifier, and folders that are none."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.models.reward_folders import build_reward_model, plain_score
from vrl.models.loading import load_reward_model, read_reward_config
from vrl.models.packing import pack
from vrl.models.renderer import check_same_tokenizer, load_renderer
from vrl.models.tiny import build_tiny_model
from vrl.protocol.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def folder(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_reward_model(text_folder, tmp_path_factory.mktemp("reward"), seed=4)


def test_scores_are_those_of_transformers_row_by_row(folder: Path) -> None:
    model = load_reward_model(folder, torch.float32)
    pad = read_reward_config(folder).pad_id
    rows = [list(range(20, 29)), [40], list(range(60, 72)), [50, 51, pad, pad], [pad, 33, 34], [pad, pad]]
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    packed = model(pack(torch.tensor([token for row in rows for token in row]), offsets))
    found = [float(packed[begin:end].sum()) for begin, end in itertools.pairwise(offsets)]
    assert int((packed != 0).sum()) == len(rows)
    wanted = [plain_score(folder, row) for row in rows]
    assert max(wanted) - min(wanted) > 0.1
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5)


def test_a_reward_model_is_frozen_and_its_head_computes_in_float32(folder: Path) -> None:
    model = load_reward_model(folder, torch.bfloat16)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model(pack(torch.arange(20, 42), torch.tensor([0, 9, 22]))).dtype == torch.float32
    assert len(model.decoder_layers()) == 2


def test_folders_that_are_no_reward_model_are_refused(
    text_folder: Path, vision_folder: Path, folder: Path, tmp_path: Path
) -> None:
    for other, name in ((text_folder, "Qwen2ForCausalLM"), (vision_folder, "Qwen2_5_VLForConditionalGeneration")):
        with pytest.raises(ConfigError, match=f"{name}, which gives no score a row"):
            load_reward_model(other, torch.float32)
    two = build_reward_model(text_folder, tmp_path / "two", seed=4, num_labels=2)
    with pytest.raises(ConfigError, match="has 2 labels, a reward model has one: save it with num_labels=1"):
        read_reward_config(two)
    unpadded = build_reward_model(text_folder, tmp_path / "unpadded", seed=4, pad_token_id=None)
    with pytest.raises(ConfigError, match="names no padding token"):
        read_reward_config(unpadded)
    bert = tmp_path / "bert"
    bert.mkdir()
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (bert / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="is not a score of the last token"):
        read_reward_config(bert)
    with pytest.raises(DataError, match="neither a model folder nor"):
        read_reward_config(tmp_path / "nowhere")


def test_another_tokenizer_is_noticed(text_folder: Path, folder: Path, tmp_path: Path) -> None:
    check_same_tokenizer(text_folder, folder, "some.key", "take another")
    other = build_tiny_model(
        "qwen2", tmp_path, ["quite other words in another language", "und noch viel mehr davon"], 3
    )
    with pytest.raises(ConfigError, match=r"^some\.key=.* has another tokenizer .*: take another$"):
        check_same_tokenizer(text_folder, other, "some.key", "take another")


def test_a_finished_conversation_has_no_generation_prompt(text_folder: Path) -> None:
    renderer = load_renderer(text_folder)
    whole = [{"role": "user", "content": "what colour"}, {"role": "assistant", "content": "red"}]
    text = "<|im_start|>user\nwhat colour<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
    assert renderer.decode(renderer.render_whole(whole), keep_special=True) == text
