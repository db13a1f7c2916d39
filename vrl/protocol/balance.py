"""Cut rows into parts of nearly equal token counts: over data-parallel ranks and into micro-batches. Torch-free.

Rows that must stay together are cut as one unit (`units_of`, `unit_sums`, then `rows_of`). Rows that begin with the
same prompt had better stay together: inside a unit its tokens count once.

Largest first onto the lightest part, and Karmarkar-Karp (largest differencing), each improved by moves and swaps
between the heaviest part and the others; the better one wins. Large problems stop at a thousandth above the ideal.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple


class RowPrompt(NamedTuple):
    """How a row begins. Rows of equal `number` have the same first `length` tokens, positions and images."""

    number: int
    length: int


_EXACT = 4096  # rows times parts up to which every method is tried to the end
_DIFFERENCING = 65536  # rows times parts above which differencing costs more than it gains
_TOLERANCE = 1.001


def partition(lengths: Sequence[int], parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Return `parts` lists of row indices, each sorted, every index exactly once.

    With `equal_counts` the list sizes differ by at most one. Parts are empty only when there are fewer rows than
    parts. Raises ValueError for `parts` below one.
    """
    if parts < 1:
        raise ValueError(f"cannot cut {len(lengths)} rows into {parts} parts")
    ideal = max(max(lengths, default=0), -(-sum(lengths) // parts))
    exact = len(lengths) * parts <= _EXACT
    return _partition(lengths, parts, equal_counts, ideal if exact else int(ideal * _TOLERANCE))


def _partition(lengths: Sequence[int], parts: int, equal_counts: bool, good: int) -> list[list[int]]:
    """Partition; a heaviest part of `good` tokens or less is not improved further."""
    if parts == 1:
        return [list(range(len(lengths)))]
    if len(lengths) <= parts:
        return [[i] for i in range(len(lengths))] + [[] for _ in range(parts - len(lengths))]
    best = _largest_first(lengths, parts, equal_counts)
    _improve(best, lengths, equal_counts, good)
    if _heaviest(best, lengths) > good and len(lengths) * parts <= _DIFFERENCING:
        second = _differencing(lengths, parts, equal_counts)
        _improve(second, lengths, equal_counts, good)
        best = min(best, second, key=lambda bins: _heaviest(bins, lengths))
    for part in best:
        if not part:  # rows without tokens crowd: a part of them is as heavy as none
            part.append(max(best, key=len).pop())
    return [sorted(part) for part in best]


def micro_batches(lengths: Sequence[int], max_tokens: int, at_least: int = 1) -> list[list[int]]:
    """Return few row lists whose token sums stay within `max_tokens`; a longer single row stands alone.

    `at_least` asks for more parts where fewer would do, because all ranks run the same number: then exactly so many are
    returned, and some may be empty. Raises ValueError for a budget below one token.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be 1 or more, got {max_tokens}")
    long = [[i] for i, length in enumerate(lengths) if length > max_tokens]
    short = [i for i, length in enumerate(lengths) if length <= max_tokens]
    short_lengths = [lengths[i] for i in short]
    bins = _few_parts(short_lengths, max_tokens)
    wanted = at_least - len(long)
    if len(bins) < wanted:
        even = partition(short_lengths, wanted)
        bins = even if _heaviest(even, short_lengths) <= max_tokens else bins + [[]] * (wanted - len(bins))
    return [[short[i] for i in part] for part in bins] + long


def in_order(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return runs of neighbouring units whose sizes add up to at most `limit`; a larger unit stands alone."""
    runs: list[list[int]] = []
    filled = limit
    for unit, size in enumerate(sizes):
        if filled + size > limit:
            runs.append([])
            filled = 0
        runs[-1].append(unit)
        filled += size
    return runs


def units_of(groups: Sequence[int]) -> list[list[int]]:
    """Return the rows of each group, groups in the order in which they first appear."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    return list(members.values())


def unit_sums(
    units: Sequence[Sequence[int]], lengths: Sequence[int], prompts: Sequence[RowPrompt] | None = None
) -> list[int]:
    """Return the tokens of each unit; with `prompts` those that are left when each prompt is computed once."""
    sums = [sum(lengths[row] for row in unit) for unit in units]
    if prompts is None:
        return sums
    once = [{prompts[row].number: prompts[row].length for row in unit} for unit in units]
    every = [sum(prompts[row].length for row in unit) for unit in units]
    return [s - e + sum(o.values()) for s, e, o in zip(sums, every, once, strict=True)]


def prompt_units(lengths: Sequence[int], prompts: Sequence[RowPrompt], max_tokens: int) -> list[list[int]]:
    """Return the rows of each prompt as a unit, in parts of at most `max_tokens` where all together are above it.

    A row that is above it with its prompt alone is a unit by itself.
    """
    units: list[list[int]] = []
    for rows in units_of([prompt.number for prompt in prompts]):
        shared = prompts[rows[0]].length
        remainders = [lengths[row] - shared for row in rows]
        units += [[rows[i] for i in part] for part in micro_batches(remainders, max(max_tokens - shared, 1))]
    return units


def rows_of(units: Sequence[Sequence[int]], parts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the rows of parts that were cut in units, sorted."""
    return [sorted(row for unit in part for row in units[unit]) for part in parts]


def _few_parts(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Bisect between what the sum allows and what best fit needs; no part is above `max_tokens`."""
    best = _best_fit(lengths, max_tokens)
    low, high = -(-sum(lengths) // max_tokens), len(best)
    while low < high:
        middle = (low + high) // 2
        bins = _partition(lengths, max(middle, 1), False, max_tokens)
        if _heaviest(bins, lengths) <= max_tokens:
            best, high = bins, middle
        else:
            low = middle + 1
    return best


def _best_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put each row, longest first, where it leaves the least room."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # room and part, sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(rooms, (lengths[i], 0))
        if at == len(rooms):
            bins.append([])
            rooms.append((max_tokens, len(bins) - 1))
        room, part = rooms.pop(at)
        bins[part].append(i)
        insort(rooms, (room - lengths[i], part))
    return [sorted(part) for part in bins]


def _heaviest(bins: list[list[int]], lengths: Sequence[int]) -> int:
    return max((sum(lengths[i] for i in part) for part in bins), default=0)


def _largest_first(lengths: Sequence[int], parts: int, equal_counts: bool) -> list[list[int]]:
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = [[] for _ in range(parts)]
    base, extra = divmod(len(lengths), parts)
    heap = [(0, part) for part in range(parts)]
    larger_left = extra
    for i in order:
        load, part = heapq.heappop(heap)
        bins[part].append(i)
        size = len(bins[part])
        if not equal_counts or size < base:
            heapq.heappush(heap, (load + lengths[i], part))
        elif size == base and larger_left > 0:
            # Parts that reach the base size may take one more row only while larger parts are still to be given.
            larger_left -= 1
            heapq.heappush(heap, (load + lengths[i], part))
    return bins


def _differencing(lengths: Sequence[int], parts: int, equal_counts: bool) -> list[list[int]]:
    """Karmarkar-Karp: repeatedly merge the two states of largest spread, heavy parts against light ones."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    # With equal counts a state starts from one row per part, so that merging keeps all counts equal.
    step = parts if equal_counts else 1
    remainder = order[: len(order) % step] if equal_counts else []
    for serial, start in enumerate(range(len(remainder), len(order), step)):
        group = order[start : start + step]
        state = [(lengths[i], [i]) for i in group] + [(0, []) for _ in range(parts - len(group))]
        state.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (state[-1][0] - state[0][0], serial, state))
    serial = len(heap)
    while len(heap) > 1:
        one, two = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(two), strict=True)]
        merged.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    bins = [rows for _, rows in sorted(heap[0][2], key=lambda entry: entry[0])]
    for part, i in zip(bins, reversed(remainder), strict=False):
        part.append(i)
    return bins


def _improve(bins: list[list[int]], lengths: Sequence[int], equal_counts: bool, good: int) -> None:
    """Move or swap rows between the heaviest part and lighter ones while the heavier of the two gets lighter."""
    loads = [sum(lengths[i] for i in part) for part in bins]
    for part in bins:
        part.sort(key=lambda i: lengths[i])
    for _ in range(8 * len(bins) + 200):
        heavy = max(range(len(bins)), key=loads.__getitem__)
        if loads[heavy] <= good:
            return
        for light in sorted((p for p in range(len(bins)) if p != heavy), key=loads.__getitem__):
            change = _best_change(bins[heavy], bins[light], lengths, loads[heavy] - loads[light], equal_counts)
            if change is not None:
                break
        else:
            return
        give, take = change
        bins[heavy].remove(give)
        insort(bins[light], give, key=lambda i: lengths[i])
        shift = lengths[give]
        if take is not None:
            bins[light].remove(take)
            insort(bins[heavy], take, key=lambda i: lengths[i])
            shift -= lengths[take]
        loads[heavy] -= shift
        loads[light] += shift


def _best_change(
    heavy: list[int], light: list[int], lengths: Sequence[int], gap: int, equal_counts: bool
) -> tuple[int, int | None] | None:
    """Return the (give, take) whose shift of load is nearest to half the gap and strictly inside it."""
    best: tuple[int, int | None] | None = None
    best_miss = gap / 2
    light_lengths = [lengths[i] for i in light]
    may_move = len(heavy) > 1 and (not equal_counts or len(heavy) > len(light))
    for give in heavy:
        at = bisect_left(light_lengths, lengths[give] - gap / 2)
        partners: list[int | None] = [light[j] for j in (at - 1, at) if 0 <= j < len(light)]
        for take in [*partners, None] if may_move else partners:
            shift = lengths[give] - (0 if take is None else lengths[take])
            if 0 < shift < gap and abs(shift - gap / 2) < best_miss:
                best, best_miss = (give, take), abs(shift - gap / 2)
    return best
