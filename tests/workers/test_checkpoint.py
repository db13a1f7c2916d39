"""Checkpoints of older versions: what still fits is loaded, what does not is refused in one line."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.workers.invariance import WHOLE, Way
from tests.workers.learner_process import learner_of
from tests.workers.rig import config_of, context_of
from vrl.models.loading import load_policy
from vrl.protocol.errors import DataError
from vrl.workers import checkpoint
from vrl.workers.building import BuildContext
from vrl.workers.learner import Learner

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("one_rank")]

ADAPTED = Way(name="adapter", adapter="beside")


@pytest.fixture
def context(tiny_folder: Callable[[str], Path]) -> BuildContext:
    return context_of(config_of(tiny_folder("qwen2")))


def written_by_an_older_version(learner: Learner, folder: Path, **counters: int) -> None:
    """Write what the first version wrote: all weights, the optimizer (of another kernel) and counters."""
    assert learner.stepper is not None
    for group in learner.stepper.optimizer.param_groups:
        group |= {"foreach": True, "fused": None}
    model, optimizer = get_state_dict(learner.module, learner.stepper.optimizer)
    state_dict_saver.save({"model": model, "optimizer": optimizer, "counters": counters}, checkpoint_id=str(folder))


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in learner.module.parameters()])


def test_a_model_that_learns_as_a_whole_takes_what_it_was_before_adapters(context: BuildContext, tmp_path: Path):
    old, new = learner_of(context, load_policy, WHOLE), learner_of(context, load_policy, WHOLE)
    with torch.no_grad():
        for parameter in old.module.parameters():
            parameter += 0.5
    written_by_an_older_version(old, tmp_path / "actor", steps_taken=7, skipped_steps=1)
    checkpoint.load(tmp_path / "actor", new)
    assert torch.equal(weights(new), weights(old))
    assert (new.steps_taken, new.skipped_steps) == (7, 1)
    assert new.stepper is not None
    assert [group["fused"] for group in new.stepper.optimizer.param_groups] == [True]


def test_a_model_with_a_frozen_part_does_not(context: BuildContext, tmp_path: Path):
    written_by_an_older_version(
        learner_of(context, load_policy, WHOLE), tmp_path / "actor", steps_taken=7, skipped_steps=1
    )
    with pytest.raises(DataError) as error:
        checkpoint.load(tmp_path / "actor", learner_of(context, load_policy, ADAPTED))
    assert f"checkpoint {tmp_path / 'actor'} is of an older version" in str(error.value)
    assert "no entry 'fits.LoRA'" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_an_entry_that_is_missing_is_named_in_one_line(context: BuildContext, tmp_path: Path):
    learner = learner_of(context, load_policy, WHOLE)
    written_by_an_older_version(learner, tmp_path / "actor", steps_taken=7)
    with pytest.raises(DataError) as error:
        checkpoint.load(tmp_path / "actor", learner)
    assert str(error.value).startswith(f"checkpoint {tmp_path / 'actor'} does not fit this model and optimizer: ")
    assert "counters.skipped_steps" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
