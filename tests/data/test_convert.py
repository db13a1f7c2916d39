"""Public datasets on disk to verl's format."""

import pytest

from vrl.data.convert import convert
from vrl.data.dataset import load_rows
from vrl.protocol.errors import DataError

QUESTION = {
    "question": "Tom has 1,000 eggs and buys 234. How many?",
    "answer": "1000 + 234 = <<1000+234=1234>>\n#### 1,234",
}


def test_gsm8k_folder_of_shards(save, tmp_path):
    save("raw/main/train-00000-of-00002.parquet", [QUESTION, QUESTION])
    save("raw/main/train-00001-of-00002.parquet", [QUESTION])
    save("raw/main/test-00000-of-00001.jsonl", [QUESTION])
    save("raw/main/notes.json", [{"x": 1}])
    assert convert("gsm8k", tmp_path / "raw", tmp_path / "out") == {"train": 3, "test": 1}
    dataset = load_rows(tmp_path / "out" / "train.parquet")
    assert dataset.row_ids == ("train:0", "train:1", "train:2")
    prompt = dataset[2]
    assert prompt.data_source == "openai/gsm8k"
    assert prompt.ground_truth == "1234"
    assert prompt.messages[0]["content"].startswith(QUESTION["question"])
    assert "####" in prompt.messages[0]["content"]
    assert prompt.images == ()
    assert prompt.extra_info["answer"] == QUESTION["answer"]
    assert prompt.extra_info["split"] == "train"


def test_geo3k_with_images_inside_and_beside_the_file(save, tmp_path, image):
    first, second = image(60, 40), image(30, 80)
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "b.png").write_bytes(second)
    rows = [
        {"problem": "<image>Find x.", "answer": "3", "images": [{"bytes": first, "path": None}]},
        {"problem": "Find y.", "answer": "2\\sqrt{3}", "images": [{"bytes": None, "path": "b.png"}]},
    ]
    save("raw/geo.parquet", rows)
    assert convert("geo3k", tmp_path / "raw" / "geo.parquet", tmp_path / "out") == {"train": 2}
    (tmp_path / "raw" / "b.png").unlink()
    dataset = load_rows(tmp_path / "out" / "train.parquet")
    assert [dataset[i].images for i in range(2)] == [(first,), (second,)]
    assert [dataset[i].ground_truth for i in range(2)] == ["3", "2\\sqrt{3}"]
    assert dataset[1].messages[0]["content"].startswith("<image>Find y.")
    assert dataset[0].data_source == "hiyouga/geometry3k"
    for part in ("<think>", "</think>", "\\boxed{}"):
        assert part in dataset[0].messages[0]["content"]


@pytest.mark.parametrize(
    ("name", "split"), [("gsm8k_test.jsonl", "test"), ("validation.jsonl", "validation"), ("latest.jsonl", "train")]
)
def test_split_of_a_single_file(save, tmp_path, name, split):
    assert convert("gsm8k", save(name, [QUESTION]), tmp_path / "out") == {split: 1}
    assert load_rows(tmp_path / "out" / f"{split}.parquet")[0].extra_info["split"] == split


def test_bad_input_is_named_and_writes_nothing(save, tmp_path):
    out = tmp_path / "out"
    path = save("train.jsonl", [QUESTION, {"question": "1 + 1?", "answer": "2"}])
    with pytest.raises(DataError, match=r"train\.jsonl, row 1: the answer '2' has no '####'"):
        convert("gsm8k", path, out)
    with pytest.raises(DataError, match=r"row 0: column 'problem' holds None, not text \(columns: question, answer\)"):
        convert("geo3k", path, out)
    with pytest.raises(DataError, match="1 <image> marks in 'problem', but 0 images"):
        convert("geo3k", save("geo.jsonl", [{"problem": "<image>x?", "answer": "1"}]), out)
    with pytest.raises(DataError, match="no such file or folder"):
        convert("gsm8k", tmp_path / "gone", out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="train, validation, test in its name"):
        convert("gsm8k", tmp_path / "empty", out)
    with pytest.raises(DataError, match="no converter named 'gsm9k'; there are gsm8k, geo3k"):
        convert("gsm9k", path, out)
    assert not out.exists()
