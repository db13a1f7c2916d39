"""A role's weights and optimizer to and from a folder, in torch's distributed format: readable at any world size."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from vrl.protocol.errors import DataError
from vrl.workers.learner import Learner


def is_writer() -> bool:
    """Whether this rank writes files that exist once."""
    return dist.get_rank() == 0


def save(folder: Path, learner: Learner) -> None:
    """Write weights, optimizer state and counters. All ranks call it; the folder must not exist yet."""
    with learner.offload.loaded(optimizer=True):
        state_dict_saver.save(_state(learner), checkpoint_id=str(folder))


def load(folder: Path, learner: Learner) -> None:
    """Read what `save` wrote, in place. Raises DataError naming what the checkpoint lacks."""
    if not (folder / ".metadata").is_file():
        raise DataError(f"checkpoint {folder} is not complete: it has no .metadata file")
    assert learner.stepper is not None
    with learner.offload.loaded(optimizer=True):
        state = _state(learner)
        try:
            state_dict_loader.load(state, checkpoint_id=str(folder))
        except RuntimeError as error:
            raise DataError(f"checkpoint {folder} does not fit this model and optimizer: {error}") from error
        set_state_dict(
            learner.module,
            learner.stepper.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    learner.steps_taken = state["counters"]["steps_taken"]
    learner.skipped_steps = state["counters"]["skipped_steps"]


def _state(learner: Learner) -> dict[str, Any]:
    assert learner.stepper is not None, "a frozen module has no checkpoint"
    model, optimizer = get_state_dict(learner.module, learner.stepper.optimizer)
    counters = {"steps_taken": learner.steps_taken, "skipped_steps": learner.skipped_steps}
    return {"model": model, "optimizer": optimizer, "counters": counters}
