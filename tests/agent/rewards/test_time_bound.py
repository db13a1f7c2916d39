"""A bound in any thread: it ends what takes too long, and never strikes when the work is done."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from vrl.agent.rewards.time_bound import within


def spin() -> None:
    """What catches every Exception it meets, as libraries do."""
    while True:
        try:
            sum(range(100))
        except Exception:  # noqa: BLE001
            continue


def test_work_without_end_is_ended_in_every_thread():
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"longer than 0\.05 s"):
        within(0.05, spin)
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(within, 0.05, spin) for _ in range(2)]:
            with pytest.raises(TimeoutError):
                future.result()
    assert time.monotonic() - begin < 10


def test_results_and_errors_come_through():
    assert within(60.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda: 1 // 0)


def test_work_that_ends_with_its_time_is_done_or_over_and_nothing_strikes_later():
    """Many times, so that both orders happen; a strike from the last round would come out of the sum."""
    before, outcomes = sys.getswitchinterval(), set[bool]()
    sys.setswitchinterval(1e-5)
    try:
        for number in range(200):
            end = time.perf_counter() + 0.0005 + 3e-5 * number

            def work(end: float = end) -> bool:
                while time.perf_counter() < end:
                    pass
                return True

            try:
                outcomes.add(within(0.002, work))
            except TimeoutError:
                outcomes.add(False)
            assert sum(range(2000)) == 1999000
    finally:
        sys.setswitchinterval(before)
    assert outcomes == {True, False}
