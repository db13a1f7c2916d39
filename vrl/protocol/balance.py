"""Cut rows into parts of nearly equal token counts: over data-parallel ranks and into micro-batches. Torch-free.

Largest first onto the lightest part, and Karmarkar-Karp (largest differencing), each improved by moves and swaps
between the heaviest part and the others; the better one wins.
"""

import heapq
from bisect import bisect_left
from collections.abc import Sequence


def partition(lengths: Sequence[int], parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Return `parts` lists of row indices, each sorted, every index exactly once.

    With `equal_counts` the list sizes differ by at most one. Parts are empty only when there are fewer rows than
    parts. Raises ValueError for `parts` below one.
    """
    if parts < 1:
        raise ValueError(f"cannot cut {len(lengths)} rows into {parts} parts")
    if parts == 1:
        return [list(range(len(lengths)))]
    if len(lengths) <= parts:
        return [[i] for i in range(len(lengths))] + [[] for _ in range(parts - len(lengths))]
    candidates = [_largest_first(lengths, parts, equal_counts)]
    _improve(candidates[0], lengths, equal_counts)
    ideal = -(-sum(lengths) // parts)
    if _heaviest(candidates[0], lengths) > max(ideal, max(lengths)):
        second = _differencing(lengths, parts, equal_counts)
        _improve(second, lengths, equal_counts)
        candidates.append(second)
    best = min(candidates, key=lambda bins: _heaviest(bins, lengths))
    return [sorted(part) for part in best]


def micro_batches(lengths: Sequence[int], max_tokens: int, at_least: int = 1) -> list[list[int]]:
    """Return row lists whose token sums stay within `max_tokens`; a longer single row stands alone.

    `at_least` asks for more parts than needed (all ranks run the same number); some of those may be empty.
    """
    if not lengths:
        return [[] for _ in range(at_least)]
    long = [[i] for i, length in enumerate(lengths) if length > max_tokens]
    short = [i for i, length in enumerate(lengths) if length <= max_tokens]
    if not short:
        return long + [[] for _ in range(at_least - len(long))]
    short_lengths = [lengths[i] for i in short]
    parts = max(-(-sum(short_lengths) // max_tokens), at_least - len(long), 1)
    while True:
        bins = partition(short_lengths, parts)
        if max(sum(short_lengths[i] for i in part) for part in bins) <= max_tokens:
            return [[short[i] for i in part] for part in bins] + long
        parts += 1


def _heaviest(bins: list[list[int]], lengths: Sequence[int]) -> int:
    return max(sum(lengths[i] for i in part) for part in bins)


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
    bins = [rows for _, rows in sorted(heap[0][2], key=lambda entry: entry[0])] if heap else [[] for _ in range(parts)]
    for part, i in zip(bins, reversed(remainder), strict=False):
        part.append(i)
    return bins


def _improve(bins: list[list[int]], lengths: Sequence[int], equal_counts: bool) -> None:
    """Move or swap rows between the heaviest part and lighter ones while the heavier of the two gets lighter."""
    loads = [sum(lengths[i] for i in part) for part in bins]
    for part in bins:
        part.sort(key=lambda i: lengths[i])
    for _ in range(8 * len(bins) + 200):
        heavy = max(range(len(bins)), key=loads.__getitem__)
        for light in sorted((p for p in range(len(bins)) if p != heavy), key=loads.__getitem__):
            change = _best_change(bins[heavy], bins[light], lengths, loads[heavy] - loads[light], equal_counts)
            if change is not None:
                break
        else:
            return
        give, take = change
        bins[heavy].remove(give)
        bins[light].append(give)
        if take is not None:
            bins[light].remove(take)
            bins[heavy].append(take)
        shift = lengths[give] - (lengths[take] if take is not None else 0)
        loads[heavy] -= shift
        loads[light] += shift
        bins[heavy].sort(key=lambda i: lengths[i])
        bins[light].sort(key=lambda i: lengths[i])


def _best_change(
    heavy: list[int], light: list[int], lengths: Sequence[int], gap: int, equal_counts: bool
) -> tuple[int, int | None] | None:
    """Return the (give, take) whose shift of load is nearest to half the gap and strictly inside it."""
    best: tuple[int, int | None] | None = None
    best_miss = gap / 2
    light_lengths = [lengths[i] for i in light]
    may_move = len(heavy) > 1 and (not equal_counts or len(heavy) > len(light))
    for give in heavy:
        if may_move and 0 < lengths[give] < gap and abs(lengths[give] - gap / 2) < best_miss:
            best, best_miss = (give, None), abs(lengths[give] - gap / 2)
        at = bisect_left(light_lengths, lengths[give] - gap / 2)
        for j in (at - 1, at):
            if 0 <= j < len(light):
                shift = lengths[give] - light_lengths[j]
                if 0 < shift < gap and abs(shift - gap / 2) < best_miss:
                    best, best_miss = (give, light[j]), abs(shift - gap / 2)
    return best
