"""The critic: what it is asked for depends on its weights alone, and they come back from checkpoint and export."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.workers.learner_process import rows_of
from tests.workers.rig import config_of, context_of
from vrl.protocol.columns import VALUES
from vrl.protocol.config.builder import fill
from vrl.protocol.dataproto import DataProto
from vrl.workers.building import BuildContext
from vrl.workers.critic import CriticWorker

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("one_rank")]

STEPS = 10


@pytest.fixture(params=["qwen2", "qwen2_5_vl"])
def context(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> BuildContext:
    config = config_of(tiny_folder(request.param))
    return context_of(fill(config, {"critic": {"optim": {"lr": 1e-2, "lr_warmup_steps": 0}}}))


@pytest.fixture
def rows(context: BuildContext) -> DataProto:
    return rows_of(context, "qwen2" if context.images is None else "qwen2_5_vl").rows(slice(0, 4))


def with_settings(context: BuildContext, **changes: object) -> BuildContext:
    return context_of(fill(context.config, changes))


def values(critic: CriticWorker, rows: DataProto) -> torch.Tensor:
    return critic.values(rows).ragged(VALUES).values


def test_a_checkpoint_and_an_exported_folder_give_the_same_values(
    context: BuildContext, rows: DataProto, tmp_path: Path
) -> None:
    critic, fresh = (CriticWorker.build(context, STEPS) for _ in range(2))
    critic.update(rows, [[0, 1], [2, 3]])
    trained = values(critic, rows)
    assert (trained - values(fresh, rows)).abs().max() > 0.1
    critic.save(tmp_path / "critic")
    fresh.load(tmp_path / "critic")
    assert torch.equal(values(fresh, rows), trained)
    critic.export(tmp_path / "huggingface")
    exported = with_settings(context, critic={"model": {"path": str(tmp_path / "huggingface")}})
    assert torch.equal(values(CriticWorker.build(exported, STEPS), rows), trained)


def test_values_do_not_depend_on_the_temperature(context: BuildContext, rows: DataProto) -> None:
    cold = with_settings(context, actor_rollout_ref={"rollout": {"temperature": 0.3}})
    found, wanted = (values(CriticWorker.build(given, STEPS), rows) for given in (cold, context))
    assert torch.equal(found, wanted)
