"""What of reported values is a number, and how metrics of several ranks or micro-batches become one: by name.

Torch-free.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real

# Words at either end of the last part of a name, as in response_length/max and perf/max_memory_allocated_gb, or at its
# end, as in tokens_sum. Token-weighted means are made in the learner, which divides by global counts, so that all ranks
# report the same number.
_EITHER_END: dict[str, Callable[[Sequence[float]], float]] = {"max": max, "min": min}
_LAST: dict[str, Callable[[Sequence[float]], float]] = {"sum": sum, "count": sum}
_LARGEST = 1e300  # the sum of as many numbers as a step may have is still finite


def as_number(value: object) -> float | None:
    """Return a number that an environment or a reward function reported; true and false are 1 and 0.

    None for everything else, also for numbers that are not finite or too large to be added up.
    """
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if abs(number) <= _LARGEST else None


def reduce_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge metrics of all ranks, by their name.

    `timing_s/*` and names whose last part begins or ends with the word `max` by maximum, with `min` by minimum, ending
    with `sum` or `count` by sum, the rest by the mean over those that have it. NaN of one rank stays NaN.
    """
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {name: _reduce(name, numbers) for name, numbers in values.items()}


def _reduce(name: str, numbers: list[float]) -> float:
    if any(math.isnan(number) for number in numbers):
        return math.nan
    if name.startswith("timing_s/"):
        return max(numbers)
    words = name.rsplit("/", 1)[-1].split("_")
    rule = _EITHER_END.get(words[0]) or _EITHER_END.get(words[-1]) or _LAST.get(words[-1])
    return rule(numbers) if rule else sum(numbers) / len(numbers)
