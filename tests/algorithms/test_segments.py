"""Row reductions and the reverse scan on borders: rows without tokens, rows without sampled tokens, long rows."""

import pytest
import torch

from vrl.algorithms import segments
from vrl.algorithms.padded import from_padded, to_padded

OFFSETS = torch.tensor([0, 0, 3, 5, 5])
MASK = torch.tensor([True, False, True, False, False])


def test_row_reductions_with_empty_rows():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert segments.row_sum(x, OFFSETS).tolist() == [0.0, 6.0, 9.0, 0.0]
    assert segments.row_counts(MASK, OFFSETS).tolist() == [0, 2, 0, 0]
    assert segments.row_mean(x, MASK, OFFSETS).tolist() == [0.0, 2.0, 0.0, 0.0]
    assert segments.last_sampled(MASK, OFFSETS).tolist() == [-1, 2, -1, -1]
    assert segments.spread(torch.tensor([9.0, 8.0, 7.0, 6.0]), OFFSETS, 5).tolist() == [8.0, 8.0, 8.0, 7.0, 7.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_totals_and_spread_over_sampled_tokens(dtype):
    offsets = torch.tensor([0, 0, 3, 3, 4, 4])
    x = torch.tensor([1.0, -2.0, 4.0, 0.5], dtype=dtype)
    mask = torch.tensor([True, False, True, True])
    assert segments.row_totals(x, offsets).tolist() == [0.0, 3.0, 0.0, 0.5, 0.0]
    assert segments.row_totals(x, offsets).dtype == torch.float64
    assert segments.row_totals(x[:0], torch.tensor([0, 0])).tolist() == [0.0]
    assert segments.row_totals(x[:0], torch.tensor([0])).tolist() == []
    spread = segments.spread_sampled(torch.arange(1, 6).to(dtype), mask, offsets)
    assert (spread.tolist(), spread.dtype) == ([2.0, 0.0, 2.0, 4.0], dtype)


def test_row_sum_passes_the_gradient_on():
    x = torch.ones(5, requires_grad=True)
    (segments.row_sum(x, OFFSETS) * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("decay", [1.0, 0.97, 0.5, 0.0])
@pytest.mark.parametrize("counts", [[1], [64], [65], [0, 128, 0, 3], [5000, 1, 63, 4097], [64 * 64, 64 * 64 + 1]])
def test_reverse_scan_equals_loop(counts, decay):
    x = torch.randn(sum(counts), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = []
    for row in x.split(counts):
        later, out = 0.0, []
        for value in reversed(row.tolist()):
            later = value + decay * later
            out.append(later)
        expected.extend(reversed(out))
    actual = segments.reverse_scan(x, torch.tensor(counts), decay)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10)


def test_reverse_scan_in_float32_keeps_its_precision():
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([20_000])
    exact = segments.reverse_scan(x.double(), counts, 0.999)
    torch.testing.assert_close(segments.reverse_scan(x, counts, 0.999).double(), exact, rtol=1e-5, atol=1e-4)


def test_whiten_of_few_or_equal_values_is_zero():
    x = torch.tensor([3.0, 0.7, 0.7, 0.7, float("nan")])
    assert segments.whiten(x, torch.tensor([False, True, True, True, False])).tolist() == [0.0] * 5
    assert segments.whiten(x, torch.tensor([True, False, False, False, False])).tolist() == [0.0] * 5
    assert segments.whiten(x, torch.zeros(5, dtype=torch.bool)).tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (torch.tensor([0, 3]), "run from 0 to the 5 tokens"),
        (torch.tensor([1, 5]), "run from 0 to the 5 tokens"),
        (torch.tensor([0, 4, 2, 5]), "go down at row 1: 4 to 2"),
    ],
)
def test_wrong_offsets_are_refused(offsets, message):
    with pytest.raises(ValueError, match=message):
        segments.check_offsets(offsets, 5)


def test_padded_and_back():
    x = torch.arange(6.0).reshape(2, 3)
    flat, offsets = from_padded(x)
    assert torch.equal(to_padded(flat, offsets), x)
    assert to_padded(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1, 3]), fill=-1.0).tolist() == [
        [-1.0, -1.0],
        [1.0, -1.0],
        [2.0, 3.0],
    ]


def test_turns_are_runs_of_one_turn_id_inside_a_row():
    turn_ids = torch.tensor([0, 0, 2, 2, 2, 5], dtype=torch.int32)
    turns = segments.Turns.of(turn_ids, torch.tensor([0, 3, 0, 3, 0]))  # the turn 2 of row 1 ends with its row
    assert turns.offsets.tolist() == [0, 2, 3, 5, 6]
    assert turns.lengths.tolist() == [2, 1, 2, 1]
    assert turns.row.tolist() == [1, 1, 3, 3]
    assert turns.ids.tolist() == [0, 2, 2, 5]
    assert turns.per_row.tolist() == [0, 2, 0, 2, 0]


def test_no_sampled_token_is_no_turn():
    turns = segments.Turns.of(torch.zeros(0, dtype=torch.int32), torch.tensor([0, 0]))
    assert (turns.offsets.tolist(), turns.row.tolist(), turns.per_row.tolist()) == ([0], [], [0, 0])


def test_groups_of_pairs():
    groups = segments.Groups.of_pairs(torch.tensor([0, 1, 0, 1, 0]), torch.tensor([-7, -7, 9, -7, -7]))
    assert groups.alone.tolist() == [False, False, True, False, False]
    assert groups.index[0] == groups.index[4] != groups.index[1]
    assert groups.index[1] == groups.index[3]
