"""How rows go to ranks and come back; declarations of worker methods; mini-batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vrl.protocol.balance import RowPrompt
from vrl.protocol.columns import COLUMNS, INPUT_IDS, LOSS_MASK, OLD_LOG_PROBS, PROMPT_LENGTH
from vrl.protocol.dataproto import DataProto, concat
from vrl.protocol.dispatch import (
    Dispatch,
    assign_mini_batches,
    check_columns,
    from_ranks,
    method_spec,
    mini_batch_shares,
    register,
    row_shares,
    to_ranks,
)
from vrl.protocol.ragged import Ragged

checked = settings(deadline=None, max_examples=80, derandomize=True)
GROUPS = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=20)


class Critic:
    """A worker with two registered methods."""

    @register(Dispatch.ROWS, requires=[INPUT_IDS, OLD_LOG_PROBS], returns=["values"])
    def values(self, batch: DataProto) -> DataProto:
        return batch

    @register(Dispatch.ALL)
    def ping(self) -> str:
        return "pong"

    def hidden(self) -> None: ...


class Actor:
    """Another worker whose method has the same name."""

    @register(Dispatch.MINI_BATCHES, requires=[LOSS_MASK])
    def values(self, batch: DataProto) -> DataProto:
        return batch


def batch_of_lengths(lengths: list[int]) -> DataProto:
    ids = Ragged.from_rows([[i] * length for i, length in enumerate(lengths)], torch.int64)
    return DataProto({INPUT_IDS: ids, PROMPT_LENGTH: torch.arange(len(lengths))})


# -- declarations ------------------------------------------------------------------------------------------------------


def test_a_method_declares_dispatch_and_columns() -> None:
    spec = method_spec(Critic, "values")
    assert (spec.name, spec.dispatch) == ("Critic.values", Dispatch.ROWS)
    assert (spec.requires, spec.returns) == ((INPUT_IDS, OLD_LOG_PROBS), ("values",))
    assert method_spec(Critic, "ping").requires == ()
    assert method_spec(Actor, "values").dispatch is Dispatch.MINI_BATCHES
    assert Critic().ping() == "pong"


@pytest.mark.parametrize("name", ["hidden", "absent", "__dict__"])
def test_a_method_that_is_not_registered(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"Critic.*{name}.*\['ping', 'values'\]"):
        method_spec(Critic, name)


def test_a_missing_column_names_method_column_and_writer() -> None:
    with pytest.raises(ValueError, match=r"Critic\.values") as caught:
        check_columns(method_spec(Critic, "values"), batch_of_lengths([1]))
    assert OLD_LOG_PROBS in str(caught.value)
    assert COLUMNS[OLD_LOG_PROBS].writer in str(caught.value)
    check_columns(method_spec(Critic, "ping"), DataProto())


# -- rows over ranks ---------------------------------------------------------------------------------------------------


@checked
@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 5))
def test_any_number_of_rows_goes_out_and_comes_back_in_order(lengths: list[int], ranks: int) -> None:
    batch = batch_of_lengths(lengths)
    shares = row_shares(lengths, ranks)
    counts = [len(share) for share in shares]
    assert len(shares) == ranks
    assert max(counts) - min(counts) <= 1
    order = [i for share in shares for i in share]
    joined = concat([batch.rows(share) for share in shares])
    back = joined.rows(torch.tensor(order, dtype=torch.int64).argsort())
    assert back.dense(PROMPT_LENGTH).tolist() == list(range(len(lengths)))
    assert torch.equal(back.ragged(INPUT_IDS).values, batch.ragged(INPUT_IDS).values)


def test_one_row_on_four_ranks() -> None:
    assert sorted(row_shares([7], 4)) == [[], [], [], [0]]
    assert row_shares([7] * 5, 2) == [[0, 1, 2], [3, 4]]  # equal rows: neighbours, which are views


def test_shares_are_balanced_by_tokens() -> None:
    lengths = [100, 1, 100, 1, 100, 1, 100, 1]
    assert [sum(lengths[i] for i in share) for share in row_shares(lengths, 4)] == [101] * 4


@checked
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), min_size=1, max_size=16), st.integers(1, 4))
def test_rows_of_a_prompt_go_to_one_rank_unless_they_are_too_much_for_it(
    rows: list[tuple[int, int]], ranks: int
) -> None:
    prompts = [RowPrompt(number, 30) for number, _ in rows]
    lengths = [30 + n for _, n in rows]
    shares = row_shares(lengths, ranks, prompts)
    assert sorted(row for share in shares for row in share) == list(range(len(rows)))
    assert len(shares) == ranks
    groups = {number: [row for row, _ in enumerate(rows) if rows[row][0] == number] for number, _ in rows}
    sums = {number: 30 + sum(lengths[row] - 30 for row in group) for number, group in groups.items()}
    for number, group in groups.items():
        holders = [share for share in shares if set(share) & set(group)]
        assert len(holders) == 1 or sums[number] > sum(sums.values()) / ranks
    everything = mini_batch_shares(torch.zeros(len(rows), 1, dtype=torch.int64), lengths, ranks, None, prompts)
    assert [share.rows for share in everything] == shares
    whole = mini_batch_shares(
        torch.zeros(len(rows), 1, dtype=torch.int64), lengths, ranks, torch.tensor([n for n, _ in rows]), prompts
    )
    for group in groups.values():
        assert sum(1 for share in whole if set(share.rows) & set(group)) == 1, "a loss needs them together"


def test_prompts_computed_once_count_once_in_the_balance() -> None:
    lengths, prompts = [110] * 8 + [120] * 4, [RowPrompt(0, 100)] * 8 + [RowPrompt(i, 100) for i in (1, 2, 3, 4)]
    shares = row_shares(lengths, 3, prompts)
    assert sorted(map(len, shares)) == [2, 2, 8]  # 180, 240 and 240 tokens


def test_ranks_that_share_sequences_are_one_to_the_dispatch() -> None:
    rows = to_ranks(["ab", "cd"], 2)
    assert rows == ["ab", "ab", "cd", "cd"]
    assert from_ranks(rows, 2) == ["ab", "cd"]
    assert from_ranks(to_ranks([[0], []], 1), 1) == [[0], []]


# -- mini-batches ------------------------------------------------------------------------------------------------------


@checked
@given(st.lists(st.integers(0, 40), min_size=1, max_size=16), st.integers(1, 4), st.data())
def test_shares_cover_every_row_once_an_epoch(lengths: list[int], ranks: int, data: st.DataObject) -> None:
    epochs = data.draw(st.integers(1, 3))
    batches = data.draw(st.integers(1, len(lengths)))
    columns = [data.draw(st.permutations([i % batches for i in range(len(lengths))])) for _ in range(epochs)]
    membership = torch.tensor(columns).T
    before = membership.clone()
    shares = mini_batch_shares(membership, lengths, ranks)
    assert torch.equal(membership, before)
    assert len(shares) == ranks
    assert {len(share.steps) for share in shares} == {epochs * batches}, "all ranks take the same optimizer steps"
    for epoch in range(epochs):
        for number in range(batches):
            step = epoch * batches + number
            parts = [[share.rows[k] for k in share.steps[step]] for share in shares]
            members = [i for i in range(len(lengths)) if membership[i, epoch] == number]
            assert sorted(i for part in parts for i in part) == members
            mean = sum(lengths[i] for i in members) / ranks
            assert max(sum(lengths[i] for i in part) for part in parts) <= mean + max(lengths[i] for i in members)
            assert sum(1 for part in parts if not part) == max(0, ranks - len(members)), "idle only for want of rows"
    for share in shares:
        assert sorted(set(share.rows)) == share.rows
        assert {k for step in share.steps for k in step} == set(range(len(share.rows))), "no row is shipped for nothing"


def test_a_mini_batch_of_one_row_leaves_ranks_without() -> None:
    shares = mini_batch_shares(torch.tensor([[0], [1]]), [5, 5], 3)
    assert [[len(step) for step in share.steps] for share in shares] == [[1, 1], [0, 0], [0, 0]]
    assert [share.rows for share in shares] == [[0, 1], [], []]


@checked
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), min_size=1, max_size=16), st.integers(1, 4))
def test_groups_stay_on_one_rank(rows: list[tuple[int, int]], ranks: int) -> None:
    groups, lengths = torch.tensor([group for group, _ in rows]), [length for _, length in rows]
    membership = (groups // 2)[:, None].repeat(1, 2)  # two groups a mini-batch, two epochs
    shares = mini_batch_shares(membership, lengths, ranks, groups)
    assert len({len(share.steps) for share in shares}) == 1
    for step in range(len(shares[0].steps)):
        parts = [[int(groups[share.rows[k]]) for k in share.steps[step]] for share in shares]
        for group in {group for part in parts for group in part}:
            (holder,) = [part for part in parts if group in part]
            assert holder.count(group) == groups.tolist().count(group)


def test_no_rows_no_steps() -> None:
    shares = mini_batch_shares(torch.zeros(0, 2, dtype=torch.int64), [], 2)
    assert [(share.rows, share.steps) for share in shares] == [([], []), ([], [])]


@checked
@given(GROUPS, st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(0, 2**40))
def test_a_mini_batch_is_all_rows_of_so_many_uids(
    groups: list[str], size: int, epochs: int, shuffle: bool, seed: int
) -> None:
    column = assign_mini_batches(groups, size, epochs, seed, shuffle)
    assert (column.dtype, tuple(column.shape)) == (torch.int64, (len(groups), epochs))
    distinct = len(set(groups))
    for numbers in column.T.tolist():
        homes: dict[str, set[int]] = {}
        for uid, number in zip(groups, numbers, strict=True):
            homes.setdefault(uid, set()).add(number)
        assert all(len(home) == 1 for home in homes.values()), "a group is never cut"
        counts = [sum(home == {number} for home in homes.values()) for number in range(max(numbers) + 1)]
        assert counts == [size] * (distinct // size) + ([distinct % size] if distinct % size else [])


def test_without_shuffle_uids_keep_their_first_order() -> None:
    column = assign_mini_batches(list("bbaacbd"), 2, 2, 0, False)
    assert column.T.tolist() == [[0, 0, 0, 0, 1, 0, 1]] * 2


def test_shuffle_is_seeded_and_differs_by_epoch() -> None:
    groups = [f"draw-{i // 4}" for i in range(256)]
    state = torch.random.get_rng_state()
    first = assign_mini_batches(groups, 4, 3, seed=1, shuffle=True)
    torch.manual_seed(5)
    assert torch.equal(first, assign_mini_batches(groups, 4, 3, seed=1, shuffle=True))
    torch.random.set_rng_state(state)
    assert not torch.equal(first, assign_mini_batches(groups, 4, 3, seed=2, shuffle=True))
    assert len({tuple(epoch) for epoch in first.T.tolist()}) == 3
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator is left alone"


def test_rows_of_no_group() -> None:
    assert tuple(assign_mini_batches([], 2, 3, 0, True).shape) == (0, 3)


def test_a_mini_batch_of_no_group_is_an_error() -> None:
    with pytest.raises(ValueError, match="0"):
        assign_mini_batches(["a"], 0, 1, 0, False)
