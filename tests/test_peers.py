"""benchmarks/peers.py without the peers: vrl's own sides at small sizes, and the sums that the tables are made of."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import peers
from benchmarks.peer_sides.rounds import Side, Spread, interleaved, tree_cpu
from benchmarks.peer_sides.step_sizes import CAP, ROWS

SMALL = (64, 64)


@pytest.mark.parametrize("part", ["algorithms", "batch", "balance"])
def test_every_case_of_our_side_makes_a_row(part: str, tmp_path: Path) -> None:
    with peers.opened(peers.part_commands(part, SMALL, tmp_path, peers=False), tmp_path) as sides:
        lines = list(peers.PARTS[part](sides, 1, tmp_path))
        cases = sides[0].cases
    rows = [line for line in lines if line.startswith("| ")][2:]
    assert len(cases) >= 4
    assert len(rows) == len(cases)
    for case, row in zip(cases, rows, strict=True):
        assert row.startswith(f"| {case}")
        assert float(row.split(" | ")[1].split()[0]) > 0


@pytest.mark.long
def test_our_side_of_the_calls_and_of_the_step(tmp_path: Path) -> None:
    with peers.opened(peers.part_commands("ray", SMALL, tmp_path, peers=False), tmp_path) as sides:
        samples = interleaved(sides, "worker-group call, 2 ranks", 1)["vrl"]
    assert samples[0]["wall_s"] > 0
    peers.write_step_workload(tmp_path)
    with peers.opened(peers.step_commands("fixed", tmp_path, peers=False), tmp_path) as sides:
        answer = sides[0].ask("step")
    assert answer["response_tokens"] == CAP["fixed"] * ROWS
    assert answer["tree_s"] > answer["timing_s/gen/engine"] > 0


def test_processes_that_have_ended_count(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); print('done'); input()"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        assert tree_cpu(psutil.Process(process.pid)) >= 0.29
        process.communicate("\n")
    with pytest.raises(RuntimeError, match="no side"):
        Side("none", [sys.executable, "-c", "raise SystemExit('no side')"], tmp_path / "log")


def test_rows_of_a_table() -> None:
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Spread(2.0, 3.0, 4.0)
    samples = {"vrl": [{"cpu_s": 0.002}] * 3, "verl": [{"cpu_s": 0.01}, {"cpu_s": 0.02}, {"cpu_s": 0.03}]}
    assert peers.line("gae", samples, "cpu_s") == (
        "| gae | 2.000 (2.000-2.000) | 20.0 (15.0-25.0) | 10.00 (7.50-12.50) | 5: met |"
    )
    fast, slow = Spread.of([4e-5]), Spread.of([6e-5])
    assert [peers.verdict("other", ours, Spread.of([0.9])) for ours in (fast, slow)] == [
        "50 us or 1: met",
        "50 us or 1: **missed**",
    ]
    assert peers.verdict("other", Spread.of([0.002]), Spread.of([0.99])) == "1: **missed**"
    assert peers.verdict("ray.get", fast, Spread.of([49.0])) == "50: **missed**"
