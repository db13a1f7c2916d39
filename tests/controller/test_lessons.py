"""Rows of supervised training: answers, and a teacher's turns played through real environments."""

from pathlib import Path
from typing import Any

import pytest

from vrl.controller.environments import checked_environments
from vrl.controller.lessons import Lessons, assistant_turns
from vrl.data.dataset import load_rows
from vrl.data.tiny_agent_tasks import agent_texts, rows
from vrl.data.tiny_rows import write_mixed
from vrl.data.tiny_tasks import tokenizer_texts
from vrl.models.renderer import HFRenderer, load_renderer
from vrl.models.tiny import build_tiny_model
from vrl.protocol.columns import IMAGE_KEYS, INPUT_IDS, LOSS_MASK
from vrl.protocol.config.builder import build
from vrl.protocol.errors import DataError
from vrl.protocol.trajectory import Prompt


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> HFRenderer:
    texts = [*tokenizer_texts(), *agent_texts()]
    return load_renderer(build_tiny_model("qwen2_5_vl", tmp_path_factory.mktemp("model"), texts, 0), None, 12544)


def config_of(file: Path, **sandbox: Any):
    tools = {"tools": ["image_zoom_in_tool"], "show_schemas": False}
    environments = {"zoom": {"class": "tools", "config": tools}, "python": {"class": "code_interpreter"}}
    agent = {"environments": environments, "max_turns": 3, "concurrent_workers": 1}
    rollout = {"agent": agent, "multi_turn": {"sandbox": sandbox}}
    values = {
        "data": {"train_files": [str(file)], "max_response_length": 128},
        "actor_rollout_ref": {"rollout": rollout},
    }
    return build(values)


def test_a_teachers_turns_are_played_and_only_they_are_learned(tmp_path: Path, renderer: HFRenderer) -> None:
    file = write_mixed(tmp_path / "rows.parquet", [list(rows("zoom", "warm_start", 6, 0))])
    taught = load_rows(file)
    prompts = [taught[index] for index in range(len(taught))]
    lessons = Lessons(config_of(file), renderer)
    try:
        batch = lessons.batch([*prompts, prompts[0]])
    finally:
        lessons.close()
    ids, masks = batch.ragged(INPUT_IDS).to_rows(), batch.ragged(LOSS_MASK).to_rows()
    looked = 0
    for prompt, row, mask, keys in zip(prompts, ids, masks, batch.objects[IMAGE_KEYS], strict=False):
        turns = assistant_turns(prompt, "messages")
        said = [token for turn in turns for token in renderer.answer_ids(turn)]
        assert row[mask].tolist() == said  # and not what the tool said
        looked += len(keys) == 2
        assert len(keys) <= 2
    assert looked > 0  # a zoomed image stands in the row
    assert ids[-1].tolist() == ids[0].tolist()


def test_rows_that_need_code_are_left_out_where_it_cannot_run(
    tmp_path: Path, renderer: HFRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_mixed(tmp_path / "rows.parquet", [list(rows(task, "train", 4, 0)) for task in ("code", "zoom")])
    config, tools = checked_environments(config_of(file, kind="remote", url="http://127.0.0.1:9"), renderer)
    assert tools.left_out == {"python"}
    assert set(config.actor_rollout_ref.rollout.agent.environments) == {"zoom"}
    assert "rows with env_name python are left out" in caplog.text
    left = load_rows(file, env_names=["python", "zoom"], left_out=tools.left_out)
    assert {left[index].env_name for index in range(len(left))} == {"zoom"}


def test_a_row_without_an_answer_is_named() -> None:
    with pytest.raises(DataError, match="row r:1: no answer to learn in column 'messages'"):
        assistant_turns(Prompt(row_id="r:1", uid="u", messages=[], extra_info={"messages": []}), "messages")
