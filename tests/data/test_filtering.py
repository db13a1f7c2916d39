"""Rows that cannot be used are found before training."""

import pytest

from vrl.data.dataset import load_rows
from vrl.data.filtering import filter_rows, overlong_policy, truncate
from vrl.protocol.errors import DataError

MARK = 0


class WordRenderer:
    """The renderer's port, for the rules of the filter alone: a word is a token, a byte of an image a visual token."""

    banned_ids = (MARK,)
    eos_ids = (1,)
    pad_id = 2

    def render(self, messages, tools=()):
        if any(message["role"] != "user" for message in messages):
            raise DataError("the chat template knows no such role")
        words = " ".join(message["content"] for message in messages).replace("<image>", " <image> ").split()
        return [MARK if word == "<image>" else 3 for word in words] + [4] * len(tools)

    def expand(self, ids, images):
        if b"broken" in images:
            raise DataError("an image cannot be used")
        sizes = iter(map(len, images))
        return [token for one in ids for token in ([MARK] * next(sizes) if one == MARK else [one])]

    def decode(self, ids, *, keep_special=False):
        return " ".join(map(str, ids))

    def positions(self, ids, images):
        return None


@pytest.fixture
def dataset(save, row):
    """Rows of 2, 9, 1 + 4 and 1 + 16 tokens, then three that cannot be used."""
    good = [row(0, "two words"), row(1, "word " * 9)]
    seen = [row(i, "<image> ?", images=[{"bytes": b"x" * size}]) for i, size in ((2, 4), (3, 16))]
    broken = [
        row(4, "<image> ?", images=[{"bytes": b"broken"}]),
        row(5, "<image> ?", images=[]),
        row(6, prompt=[{"role": "oracle", "content": "?"}]),
    ]
    return load_rows(save("a.parquet", good + seen + broken))


def test_lengths_count_visual_tokens(dataset):
    for limit, kept in ((17, 4), (16, 3), (9, 3), (8, 2), (5, 2), (4, 1)):
        rows, report = filter_rows(dataset, WordRenderer(), limit)
        assert len(rows) == report.kept == kept
        assert (report.overlong, report.broken, report.total) == (4 - kept, 3, 7)
        assert report.longest == 17
    assert filter_rows(dataset, WordRenderer(), 5)[0].row_ids == ("a:0", "a:2")


def test_the_report_says_what_and_where(dataset):
    rows, report = filter_rows(dataset, WordRenderer(), 8)
    assert report.summary() == "2 of 7 rows kept (2 too long, 3 broken), longest prompt 17 tokens"
    assert len(report.examples) == 3
    assert report.data_sources == frozenset(rows[i].data_source for i in range(2))
    assert report.examples[0].endswith(
        "a.parquet, row 1: the prompt (0 images) has 9 tokens, data.max_prompt_length is 8"
    )
    assert "row 3: the prompt (1 images) has 17 tokens" in report.examples[1]
    assert report.examples[2].endswith("a.parquet, row 4: an image cannot be used")
    _, report = filter_rows(dataset, WordRenderer(), 100)
    assert report.examples[1].endswith("row 5: 1 <image> marks in 'prompt', but 0 images in 'images'")
    assert report.examples[2].endswith("row 6: the chat template knows no such role")


def test_too_long_is_refused_with_both_numbers_and_a_way_out(dataset):
    with pytest.raises(DataError) as caught:
        filter_rows(dataset, WordRenderer(), 8, overlong="stop")
    message = str(caught.value)
    assert "2 of 7 rows kept (2 too long, 3 broken)" in message
    assert "row 1: the prompt (0 images) has 9 tokens, data.max_prompt_length is 8" in message
    assert "data.filter_overlong_prompts=True" in message
    assert "data.bad_row" not in message
    assert len(filter_rows(dataset, WordRenderer(), 17, overlong="stop")[0]) == 4


def test_broken_is_refused_with_a_way_out(dataset):
    with pytest.raises(
        DataError, match=r"row 1: the prompt .* row 4: an image cannot be used.*data\.bad_row=skip"
    ) as caught:
        filter_rows(dataset, WordRenderer(), 8, bad_row="stop")
    assert "filter_overlong_prompts" not in str(caught.value)
    good = dataset.select(range(4))
    assert filter_rows(good, WordRenderer(), 8, bad_row="stop")[0].row_ids == ("a:0", "a:2")


def test_nothing_left_is_refused_under_every_policy(dataset):
    for policy in ("skip", "stop"):
        with pytest.raises(DataError, match=r"no row is left: 0 of 7 rows kept \(4 too long, 3 broken\)"):
            filter_rows(dataset, WordRenderer(), 1, overlong=policy, bad_row=policy)


def test_cut_keeps_long_text_but_refuses_a_long_prompt_with_images(dataset):
    with pytest.raises(DataError, match=r"row 3: the prompt \(1 images\) has 17 tokens"):
        filter_rows(dataset, WordRenderer(), 8, overlong="cut")
    rows, report = filter_rows(dataset.select(range(3)), WordRenderer(), 8, overlong="cut")
    assert rows.row_ids == ("a:0", "a:1", "a:2")
    assert (report.cut, report.overlong) == (1, 0)
    assert "1 to be truncated" in report.summary()


def test_the_settings_of_verl():
    for truncation in ("error", "left", "right", "middle"):
        assert overlong_policy(True, truncation) == "skip"
        assert overlong_policy(False, truncation) == ("stop" if truncation == "error" else "cut")


def test_workers_find_the_same(save, row):
    rows = [row(i, "<image> " + "w " * (i % 7), images=[{"bytes": b"x"}]) for i in range(300)]
    dataset = load_rows(save("a.parquet", rows))
    one = filter_rows(dataset, WordRenderer(), 4)
    three = filter_rows(dataset, WordRenderer(), 4, workers=3)
    assert (one[0].row_ids, one[1]) == (three[0].row_ids, three[1])
    assert one[1].kept == sum(i % 7 <= 3 for i in range(300))


def test_what_shows_the_tools_counts(save, row):
    dataset = load_rows(save("a.parquet", [row(0, "one"), row(1, "two", env_name="zoom")]), env_names=["zoom"])
    assert filter_rows(dataset, WordRenderer(), 9, tools={"zoom": [{}, {}]})[1].longest == 3
    assert filter_rows(dataset, WordRenderer(), 2, tools={"zoom": [{}, {}]})[0].row_ids == ("a:0",)


def test_truncate():
    ids = list(range(7))
    assert truncate(ids, 7, "error") == ids
    assert truncate(ids, 3, "left") == [4, 5, 6]
    assert truncate(ids, 3, "right") == [0, 1, 2]
    assert truncate(ids, 3, "middle") == [0, 5, 6]
    assert truncate(ids, 4, "middle") == [0, 1, 5, 6]
    assert truncate(ids, 0, "left") == truncate(ids, 0, "middle") == []
    with pytest.raises(DataError, match=r"7 tokens, data\.max_prompt_length is 3"):
        truncate(ids, 3, "error")
