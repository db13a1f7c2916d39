"""One update of the learner is the same however its rows are cut: over ranks, micro-batches, budgets, shared rows."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.workers.rig import build_tiny

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Cut:
    """How the rows of a mini-batch are cut."""

    world: int
    max_tokens: int = 10_000
    rows: int | None = None
    first_rank: int | None = None  # rows of rank 0; None: half
    shared_by: int = 1  # ranks that share their sequences

    @property
    def name(self) -> str:
        cut = f"world{self.world}-tokens{self.max_tokens}-rows{self.rows}-first{self.first_rank}"
        return cut if self.shared_by == 1 else f"{cut}-shared{self.shared_by}"


CUTS = (
    Cut(1, rows=1),
    Cut(1, rows=3),
    Cut(1, max_tokens=90),
    Cut(2),
    Cut(2, rows=1),
    Cut(2, max_tokens=70),
    Cut(2, first_rank=0),  # a rank without a row
    Cut(2, first_rank=6),  # and one with very unequal shares
    Cut(2, shared_by=2),
    Cut(2, rows=1, shared_by=2),
    Cut(2, max_tokens=35, shared_by=2),
)
WHOLE = Cut(1)
GROUPS = (Cut(4, shared_by=2), Cut(4, first_rank=0, shared_by=2))  # two groups of two ranks
COMPARED = ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "moved",
            "critic/vf_loss", "critic/grad_norm")  # fmt: skip


def run_cuts(folder: Path, kind: str, world: int, cuts: list[Cut], out: Path) -> dict[str, dict[str, float]]:
    """Run the cuts of one world size in processes of their own; return rank 0's metrics by cut."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    argument = json.dumps({"folder": str(folder), "kind": kind, "cuts": [vars(cut) for cut in cuts], "out": str(out)})
    shared = os.environ | {"WORLD_SIZE": str(world), "MASTER_PORT": str(port), "PYTHONPATH": str(HERE.parents[1])}
    script = [sys.executable, str(HERE / "learner_process.py"), argument]
    processes = [subprocess.Popen(script, env=shared | {"RANK": str(rank)}) for rank in range(world)]
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world
    return dict(zip((cut.name for cut in cuts), json.loads(out.read_text()), strict=True))


@pytest.fixture(scope="module", params=["qwen2", "qwen2_5_vl"])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    root = tmp_path_factory.mktemp(request.param)
    folder = build_tiny(request.param, root)
    found: dict[str, dict[str, float]] = {}
    for world in (1, 2):
        cuts = [cut for cut in (WHOLE, *CUTS) if cut.world == world]
        found |= run_cuts(folder, request.param, world, cuts, root / f"world{world}.json")
    return found


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    root = tmp_path_factory.mktemp("groups")
    return run_cuts(build_tiny("qwen2", root), "qwen2", 4, list(GROUPS), root / "world4.json")


@pytest.mark.dist
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)
def test_cutting_the_batch_changes_nothing(measured: dict[str, dict[str, float]], cut: Cut) -> None:
    whole, found = measured[WHOLE.name], measured[cut.name]
    for name in COMPARED:
        assert found[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-9), name
    assert whole["actor/grad_norm"] > 1e-3  # there was something to compare
    assert whole["moved"] > 0


@pytest.mark.dist
@pytest.mark.parametrize("measured", ["qwen2"], indirect=True)
@pytest.mark.parametrize("cut", GROUPS, ids=lambda cut: cut.name)
def test_groups_of_ranks_that_share_sequences_change_nothing(
    measured: dict[str, dict[str, float]], groups: dict[str, dict[str, float]], cut: Cut
) -> None:
    for name in (*COMPARED, "log_prob_checksum", "entropy_checksum", "values_checksum"):
        assert groups[cut.name][name] == pytest.approx(measured[WHOLE.name][name], rel=1e-5, abs=1e-9), name


@pytest.mark.dist
def test_values_and_log_probs_keep_the_order_of_rows(measured: dict[str, dict[str, float]]) -> None:
    whole = measured[WHOLE.name]
    for cut in CUTS:
        for name in ("log_prob_checksum", "entropy_checksum", "values_checksum"):
            assert measured[cut.name][name] == pytest.approx(whole[name], rel=1e-5), (cut.name, name)


@pytest.mark.dist
def test_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(measured: dict[str, dict[str, float]]) -> None:
    for cut in (WHOLE, Cut(2), Cut(2, shared_by=2)):
        assert measured[cut.name]["skipped"] == 1.0
        assert measured[cut.name]["moved_by_skipped"] == 0.0
        assert measured[cut.name]["moved_after_skipped"] > 0.0
