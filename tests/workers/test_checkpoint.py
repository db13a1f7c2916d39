"""Checkpoints: what is loaded goes on as it was, under the settings of this run; older ones fit or are refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.workers.invariance import WHOLE, Way
from tests.workers.learner_process import learner_of, objective_of, rows_of
from tests.workers.rig import config_of, context_of
from vrl.models.loading import load_policy
from vrl.protocol.config.builder import fill
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


def optimizer_of(learner: Learner) -> torch.optim.Optimizer:
    assert learner.stepper is not None
    return learner.stepper.optimizer


def step(context: BuildContext, learner: Learner) -> None:
    rows = rows_of(context, "qwen2").rows(slice(0, 2))
    learner.update(rows, [[0, 1]], objective_of(context))


def test_a_checkpoint_before_the_first_step_changes_no_later_one(context: BuildContext, tmp_path: Path):
    plain, saved, loaded = (learner_of(context, load_policy, WHOLE) for _ in range(3))
    start = weights(plain)
    checkpoint.save(tmp_path / "actor", saved)
    assert not optimizer_of(saved).state
    checkpoint.load(tmp_path / "actor", loaded)
    for learner in (plain, saved, loaded):
        step(context, learner)
        assert {float(entries["step"]) for entries in optimizer_of(learner).state.values()} == {1.0}
    assert not torch.equal(weights(plain), start)
    assert torch.equal(weights(saved), weights(plain))
    assert torch.equal(weights(loaded), weights(plain))


def test_the_settings_of_the_run_hold_over_those_of_the_checkpoint(context: BuildContext, tmp_path: Path):
    old, same = (learner_of(context, load_policy, WHOLE) for _ in range(2))
    step(context, old)
    checkpoint.save(tmp_path / "actor", old)
    assert checkpoint.load(tmp_path / "actor", same) == ""
    optim = {"lr": 0.5, "betas": [0.8, 0.95], "weight_decay": 0.0}
    changed = fill(context.config, {"actor_rollout_ref": {"actor": {"optim": optim}}})
    new = learner_of(replace(context, config=changed), load_policy, WHOLE)
    said = checkpoint.load(tmp_path / "actor", new)
    assert said == (
        "betas=(0.8, 0.95) holds; the checkpoint has (0.9, 0.999), weight_decay=0.0 holds; the checkpoint has 0.01"
    )
    for found, wanted in zip(optimizer_of(new).param_groups, optimizer_of(same).param_groups, strict=True):
        assert {**found, "params": []} == {**wanted, "params": [], **optim, "betas": (0.8, 0.95)}
    for moments in zip(*(optimizer_of(learner).state.values() for learner in (new, old)), strict=True):
        assert all(torch.equal(moments[0][name], moments[1][name]) for name in ("step", "exp_avg", "exp_avg_sq"))
