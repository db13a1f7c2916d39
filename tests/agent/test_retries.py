"""Which try comes after a failure, and when."""

import logging

import pytest

from vrl.agent.retries import Retries, Start
from vrl.protocol.trajectory import Prompt

FIRST = Start(Prompt(row_id="row", uid="uid", messages=[]), 2)


def test_pauses_grow_and_tries_end(caplog: pytest.LogCaptureFixture) -> None:
    retries, start, pauses = Retries(8), FIRST, list[float]()
    with caplog.at_level(logging.WARNING):
        while retries.again(start, "Traceback: the service is down"):
            after = retries.resting["uid/2"]
            pauses.append(float(caplog.messages[-1].split("begins in ")[1].split(" s")[0]))
            retries.rested("uid/2")
            assert retries.ready.pop() is after
            assert after.retry == start.retry + 1
            start = after
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert not retries
    assert "row row, sample 2: try 1 of 9 failed" in caplog.messages[0]
    assert "the service is down" in caplog.messages[0]


def test_what_another_did_costs_no_try() -> None:
    retries = Retries(0)
    assert retries.again(FIRST, "process died", charged=False)
    (rerun,) = retries.ready
    assert (rerun.retry, rerun.reruns, rerun.most_calls) == (0, 1, None)
    assert not retries.again(rerun, "process died", suspect=True)


def test_suspects_run_with_fewer_and_fewer() -> None:
    retries, start, limits = Retries(1), FIRST, list[int | None]()
    for _ in range(3):
        assert retries.again(start, "process died", charged=False, suspect=True)
        start = retries.ready.pop()
        limits.append(start.most_calls)
    assert limits == [8, 1, 1]
    assert retries.again(FIRST, "process died", suspect=True)
    assert retries.resting["uid/2"].most_calls == 1
