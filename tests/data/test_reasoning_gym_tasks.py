"""One-digit sums and differences from reasoning-gym."""

import re

import pytest

from vrl.data.dataset import load_rows
from vrl.data.reasoning_gym_tasks import INSTRUCTION, ROWS_PER_SPLIT, arithmetic_rows, write_reasoning_gym_data
from vrl.protocol.errors import DataError

EXPRESSION = re.compile(r"\d(?: [+-] \d)+")


def expression_of(row):
    return EXPRESSION.search(row["prompt"][1]["content"]).group()


def signed_terms(expression):
    return tuple(sorted(("+ " + expression).replace("+ ", "+").replace("- ", "-").split()))


def test_rows_are_right_and_different():
    rows = arithmetic_rows("train", 200, seed=0)
    for row in rows:
        terms = signed_terms(expression_of(row))
        assert len(terms) == 2
        assert str(sum(int(term) for term in terms)) == row["reward_model"]["ground_truth"]
        assert row["prompt"][0] == {"role": "system", "content": INSTRUCTION}
    assert len({row["prompt"][1]["content"] for row in rows}) == 200
    assert rows == arithmetic_rows("train", 200, seed=0) != arithmetic_rows("train", 200, seed=1)


def test_splits_share_no_sum_whatever_the_seed_the_wording_and_the_order_of_terms():
    sums = {
        split: {signed_terms(expression_of(row)) for seed in (0, 7) for row in arithmetic_rows(split, count, seed)}
        for split, count in ROWS_PER_SPLIT.items()
    }
    assert sums["train"].isdisjoint(sums["val"])
    assert sums["warm_start"].isdisjoint(sums["train"] | sums["val"])
    assert all(len(found) > 15 for found in sums.values())


def test_files_load_as_datasets(tmp_path):
    paths = write_reasoning_gym_data(tmp_path, seed=0, rows_per_split={"train": 5, "val": 4})
    dataset = load_rows(paths["train"])
    assert dataset.row_ids == tuple(f"train:{i}" for i in range(5))
    assert dataset[0].data_source == "reasoning_gym/chain_sum"
    assert len(load_rows(paths["val"])) == 4


def test_more_rows_than_there_are_questions():
    with pytest.raises(DataError, match=r"split warm_start: 2000 rows asked for, but there are only \d+ different"):
        arithmetic_rows("warm_start", 2000, seed=0)
    with pytest.raises(DataError, match="split='test' is unknown"):
        arithmetic_rows("test", 1, seed=0)
