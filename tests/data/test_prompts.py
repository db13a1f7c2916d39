"""From a row to a prompt."""

from pathlib import Path

import pytest

from vrl.data.prompts import ColumnNames, to_prompt
from vrl.protocol.errors import DataError

NAMES = ColumnNames()
HERE = Path()


def prompt_of(row):
    return to_prompt(row, NAMES, HERE, "file:0")


def test_columns_of_a_row(row):
    prompt = prompt_of(
        row(
            index=7,
            env_name="calculator",
            tools_kwargs={"add": {"create_kwargs": {"limit": 3, "note": None}}, "sub": None},
            level="easy",
        )
    )
    assert prompt.row_id == prompt.uid == "file:0"
    assert prompt.messages == [{"role": "user", "content": "What is 1 + 1?"}]
    assert prompt.images == ()
    assert prompt.data_source == "math/sums"
    assert prompt.ground_truth == "2"
    assert prompt.env_name == "calculator"
    assert prompt.tools_kwargs == {"add": {"create_kwargs": {"limit": 3}}}
    assert prompt.extra_info == {
        "split": "train",
        "index": 7,
        "ability": "math",
        "level": "easy",
        "reward_model": {"style": "rule"},
    }


def test_extra_info_wins_over_a_column_of_the_same_name(row):
    assert (
        prompt_of(row(extra_info={"level": "of the info"}, level="of the column")).extra_info["level"] == "of the info"
    )


def test_tools_kwargs_inside_extra_info(row):
    info = {"index": 0, "need_tools_kwargs": True, "tools_kwargs": {"add": {"create_kwargs": {"truth": "2"}}}}
    assert prompt_of(row(extra_info=info)).tools_kwargs == {"add": {"create_kwargs": {"truth": "2"}}}
    assert prompt_of(row(extra_info=info, tools_kwargs={"sub": {}})).tools_kwargs == {"sub": {}}


def test_a_row_with_nothing_but_a_prompt():
    prompt = prompt_of({"prompt": "Say hello."})
    assert prompt.messages == [{"role": "user", "content": "Say hello."}]
    assert prompt.data_source == "unknown"
    assert prompt.ground_truth is None
    assert prompt.env_name is None
    assert prompt.extra_info == prompt.tools_kwargs == {}


@pytest.mark.parametrize("cell", [None, float("nan"), ""])
def test_missing_cells_are_a_plain_row(row, cell):
    prompt = prompt_of(row(images=cell, env_name=cell, tools_kwargs=cell, data_source=cell))
    assert prompt.images == ()
    assert prompt.env_name is None
    assert prompt.tools_kwargs == {}
    assert prompt.data_source == "unknown"


def test_other_column_names(row, image):
    data = image()
    names = ColumnNames(prompt="chat", image="pictures", data_source="task")
    given = row(chat=[{"role": "user", "content": "<image>?"}], pictures=[{"bytes": data}], task="seeing")
    prompt = to_prompt(given, names, HERE, "file:0")
    assert (prompt.images, prompt.data_source, prompt.messages[0]["content"]) == ((data,), "seeing", "<image>?")
    assert "pictures" not in prompt.extra_info


def test_typed_content_becomes_marks(row, image):
    first, second = image(color=(1, 2, 3)), image(color=(4, 5, 6))
    content = [
        {"type": "image", "text": None},
        {"type": "text", "text": "and "},
        {"type": "image"},
        {"type": "text", "text": ": same?"},
    ]
    messages = [{"role": "system", "content": "Look.", "tool_calls": None}, {"role": "user", "content": content}]
    prompt = prompt_of(row(prompt=messages, images=[first, second]))
    assert prompt.messages == [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": "<image>and <image>: same?"},
    ]
    assert prompt.images == (first, second)


@pytest.mark.parametrize(("text", "count"), [("<image><image>?", 1), ("no mark", 1), ("<image>?", 0)])
def test_marks_and_images_must_agree(row, image, text, count):
    with pytest.raises(DataError) as caught:
        prompt_of(row(text=text, images=[image()] * count))
    assert f"{text.count('<image>')} <image> marks in 'prompt', but {count} images in 'images'" in str(caught.value)


def test_a_mark_that_an_assistant_wrote_is_text(row, image):
    messages = [{"role": "assistant", "content": "I see no <image>."}, {"role": "user", "content": "Here: <image>"}]
    assert len(prompt_of(row(prompt=messages, images=[image()])).images) == 1


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"prompt": None}, "column 'prompt' holds None; it must hold messages"),
        ({"prompt": []}, r"column 'prompt' holds \[\]; it must hold messages"),
        ({"prompt": 3}, "column 'prompt' holds 3; it must hold messages"),
        ({"prompt": [{"content": "no role"}]}, "must have 'role' and 'content'"),
        ({"prompt": ["text"]}, "must have 'role' and 'content'"),
        ({"prompt": [{"role": "user", "content": None}]}, "content of a message is NoneType; it must be text"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]},
            "belong into the image column",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "holds the part"),
        ({"extra_info": "text"}, "column 'extra_info' holds str; it must hold a dict"),
        ({"reward_model": [1]}, "column 'reward_model' holds list; it must hold a dict"),
        ({"tools_kwargs": 1}, "column 'tools_kwargs' holds int; it must hold a dict"),
        ({"videos": ["a.mp4"]}, "column 'videos' is not empty"),
    ],
)
def test_broken_rows_say_what_is_wrong(row, columns, says):
    with pytest.raises(DataError, match=says):
        prompt_of(row(**columns))
