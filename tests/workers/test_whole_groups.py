"""Losses over whole groups: the update does not depend on how groups are cut over ranks and micro-batches."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.workers.rig import build_tiny

pytestmark = pytest.mark.dist

HERE = Path(__file__).parent
WHOLE = "whole"
CUTS: dict[int, dict[str, dict[str, Any]]] = {  # world size -> name -> settings of the actor
    1: {
        WHOLE: {},
        "a group at a time": {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 1},
        "five rows at a time": {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 5},
        "few tokens": {"ppo_max_token_len_per_gpu": 60},
    },
    2: {
        "two ranks": {},
        "two ranks, few tokens": {"ppo_max_token_len_per_gpu": 60},
        "two ranks that share sequences": {"ulysses_sequence_parallel_size": 2},
    },
}
LOSSES = {
    "tba": {"loss_mode": "tba", "tba_beta": 0.5},
    "ipo": {"loss_mode": "dpo", "dpo_beta": 0.4, "dpo_loss_type": "ipo"},
}
Found = Mapping[str, Mapping[str, Mapping[str, Any]]]  # cut -> loss -> numbers


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Found:
    root = tmp_path_factory.mktemp("groups")
    folder = build_tiny("qwen2", root)
    found: dict[str, Any] = {}
    for world, cuts in CUTS.items():
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        out = root / f"world{world}.json"
        argument = json.dumps({"folder": str(folder), "cuts": cuts, "losses": LOSSES, "out": str(out)})
        shared = os.environ | {"WORLD_SIZE": str(world), "MASTER_PORT": str(port), "PYTHONPATH": str(HERE.parents[1])}
        script = [sys.executable, str(HERE / "group_process.py"), argument]
        processes = [subprocess.Popen(script, env=shared | {"RANK": str(rank)}) for rank in range(world)]
        try:
            assert [process.wait(timeout=300) for process in processes] == [0] * world
        finally:
            for process in processes:
                process.kill()
        found |= json.loads(out.read_text())
    return found


@pytest.mark.parametrize("loss", LOSSES)
def test_cutting_groups_changes_nothing(measured: Found, loss: str) -> None:
    whole = measured[WHOLE][loss]
    assert whole["actor/grad_norm"] > 1e-3
    assert whole["moved"] > 0
    for cut in (name for cuts in CUTS.values() for name in cuts):
        found = measured[cut][loss]
        assert found.keys() == whole.keys()
        for name, value in whole.items():
            if name != "rows":
                assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-9), (cut, name)


def test_trajectory_balance_is_the_plain_formula(measured: Found) -> None:
    """In float64 from the sums of log-probs of rows, each group by itself, no matter where its rows stand."""
    rows, found = measured[WHOLE]["tba"]["rows"], measured[WHOLE]["tba"]
    losses, logs = [], []
    for group in set(rows["group"]):
        at = [i for i, own in enumerate(rows["group"]) if own == group]
        target = {i: rows["ref"][i] + rows["score"][i] / 0.5 for i in at}
        log_z = sum(target[i] - rows["policy"][i] for i in at) / len(at)
        losses += [(log_z + rows["policy"][i] - target[i]) ** 2 for i in at]
        logs += [log_z] * len(at)
    assert found["actor/pg_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found["actor/tba_log_z"] == pytest.approx(sum(logs) / len(logs), rel=1e-5)


def test_a_pair_is_compared_by_its_scores(measured: Found) -> None:
    rows, found = measured[WHOLE]["ipo"]["rows"], measured[WHOLE]["ipo"]
    losses = []
    for group in set(rows["group"]):
        better, worse = sorted(
            (i for i, own in enumerate(rows["group"]) if own == group), key=lambda i: -rows["score"][i]
        )
        gain = [rows["policy"][i] - rows["ref"][i] for i in (better, worse)]
        losses.append((gain[0] - gain[1] - 0.5 / 0.4) ** 2)
    assert found["actor/pg_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
