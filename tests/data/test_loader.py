"""Batches, epochs and the position after a resume."""

import json

import pytest

from vrl.agent.episode import failed_row
from vrl.data.dataset import load_rows
from vrl.data.loader import PromptLoader, ordered_batches
from vrl.protocol.dataproto import Meta
from vrl.protocol.errors import DataError
from vrl.protocol.rows import batch_of, group_numbers


@pytest.fixture
def dataset(save, row):
    return load_rows(save("train.parquet", [row(i) for i in range(10)]))


def ids(batch):
    return [prompt.row_id for prompt in batch]


def uids(batches):
    return [[prompt.uid for prompt in batch] for batch in batches]


def test_an_epoch_draws_each_row_once_in_an_order_of_its_own(dataset):
    loader = PromptLoader(dataset, 5, seed=1)
    epochs = [[row_id for batch in loader for row_id in ids(batch)] for _ in range(3)]
    assert loader.epoch == 3
    assert all(sorted(epoch) == sorted(dataset.row_ids) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_is_a_matter_of_the_seed(dataset):
    first, same, other = (ids(PromptLoader(dataset, 10, seed=seed).next_batch()) for seed in (1, 1, 2))
    assert first == same != other
    assert ids(PromptLoader(dataset, 10, shuffle=False).next_batch()) == list(dataset.row_ids)


def test_uids_name_draws_and_never_repeat(dataset):
    loader = PromptLoader(dataset, 4, shuffle=False)
    batches = uids(loader.next_batch() for _ in range(5))
    assert batches[0] == ["0-0-train:0", "0-1-train:1", "0-2-train:2", "0-3-train:3"]
    assert batches[2][0] == "1-0-train:0"
    drawn = [uid for batch in batches for uid in batch]
    assert len(set(drawn)) == len(drawn) == 20


def test_the_same_words_about_another_image_are_another_group(save, row, image):
    shown = [image(20, 24), image(24, 20)]
    rows = [row(text="<image> What is shown?", images=[{"bytes": data}]) for data in shown]
    drawn = PromptLoader(load_rows(save("train.parquet", rows)), 2, shuffle=False).next_batch()
    assert drawn[0].messages == drawn[1].messages
    assert [prompt.images for prompt in drawn] == [(data,) for data in shown]
    assert len({prompt.uid for prompt in drawn}) == 2
    sampled = [failed_row(prompt, index, "no engine here") for index in range(2) for prompt in drawn]
    assert group_numbers(batch_of(sampled, None, Meta())).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [4, 4]), (False, [4, 4, 2])])
def test_the_last_batch_of_an_epoch(dataset, drop_last, sizes):
    loader = PromptLoader(dataset, 4, drop_last=drop_last)
    assert len(loader) == len(sizes)
    assert [len(batch) for batch in loader] == sizes
    assert [len(batch) for batch in loader] == sizes


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("done", range(8))
def test_a_resumed_loader_goes_on_as_if_nothing_happened(dataset, done, drop_last):
    whole = PromptLoader(dataset, 4, seed=3, drop_last=drop_last)
    expected = uids(whole.next_batch() for _ in range(12))
    stopped = PromptLoader(dataset, 4, seed=3, drop_last=drop_last)
    for _ in range(done):
        stopped.next_batch()
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = PromptLoader(dataset, 4, seed=3, drop_last=drop_last)
    resumed.load_state_dict(state)
    assert resumed.epoch == stopped.epoch
    assert uids(resumed.next_batch() for _ in range(12 - done)) == expected[done:]


def test_a_state_taken_inside_the_epoch_loop_counts_the_batch_in_hand(dataset):
    loader = PromptLoader(dataset, 5, seed=3)
    states = [loader.state_dict() for _ in loader]
    assert [(state["epoch"], state["position"]) for state in states] == [(0, 5), (1, 0)]
    resumed = PromptLoader(dataset, 5, seed=3)
    resumed.load_state_dict(states[0])
    assert len(list(resumed)) == 1
    assert uids(resumed) == uids(loader)


def test_a_state_taken_after_a_few_batches_of_another_size_never_gives_a_short_batch(dataset):
    small, large = PromptLoader(dataset, 3), PromptLoader(dataset, 4)
    for _ in range(3):
        small.next_batch()
    state = small.state_dict() | {"epoch": 0, "position": 9}
    large.load_state_dict(state)
    assert large.epoch == 1
    assert len(large.next_batch()) == 4


def test_other_data_is_refused_on_resume(dataset, save, row):
    state = PromptLoader(dataset, 4, seed=3).state_dict()
    with pytest.raises(DataError, match="seed 3 then, 4 now"):
        PromptLoader(dataset, 4, seed=4).load_state_dict(state)
    with pytest.raises(DataError, match="rows 10 then, 9 now"):
        PromptLoader(dataset.select(range(9)), 4, seed=3).load_state_dict(state)
    other = load_rows(save("other.parquet", [row(i) for i in range(10)]))
    with pytest.raises(DataError, match="row_ids_sha256"):
        PromptLoader(other, 4, seed=3).load_state_dict(state)


def test_a_dataset_smaller_than_a_batch_is_refused_with_both_numbers(dataset):
    with pytest.raises(DataError, match=r"the dataset has 10 rows, less than one batch of data\.train_batch_size=11"):
        PromptLoader(dataset, 11)
    assert len(PromptLoader(dataset, 11, drop_last=False).next_batch()) == 10
    with pytest.raises(DataError, match="the dataset has 0 rows"):
        PromptLoader(dataset.select([]), 1, drop_last=False)
    with pytest.raises(DataError, match="train_batch_size=0"):
        PromptLoader(dataset, 0)
    with pytest.raises(DataError, match=r"data\.seed=-1"):
        PromptLoader(dataset, 1, seed=-1)


def test_validation_goes_through_every_row_in_order_and_alike_each_time(dataset):
    batches = list(ordered_batches(dataset, 4))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert [row_id for batch in batches for row_id in ids(batch)] == list(dataset.row_ids)
    assert batches[1][0].uid == "val-4-train:4"
    assert uids(batches) == uids(ordered_batches(dataset, 4))
    assert [len(batch) for batch in ordered_batches(dataset)] == [10]
    with pytest.raises(DataError, match="val_batch_size=0"):
        list(ordered_batches(dataset, 0))
