"""A role's weights and optimizer to and from a folder, in torch's distributed format: readable at any world size.

Parameters that do not learn (the model under an adapter, a frozen vision tower) are not written: they are in the model
folder. A checkpoint remembers a fingerprint of them, and does not load over others.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from vrl.models import lora
from vrl.protocol.errors import DataError
from vrl.workers.learner import Learner

_FITS = "fits"
_MODULUS = 2**31 - 1  # sums of such numbers over all ranks stay exact in 64 bits
_KERNEL = ("foreach", "fused")  # which of torch's kernels steps: as is best on this machine, not as in the checkpoint
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_writer() -> bool:
    """Whether this rank writes files that exist once."""
    return dist.get_rank() == 0


def save(folder: Path, learner: Learner) -> None:
    """Write trained weights, optimizer state and counters. All ranks call it; the folder must not exist yet."""
    with learner.offload.loaded(optimizer=True):
        state_dict_saver.save(_state(learner) | {_FITS: _fits(learner.module)}, checkpoint_id=str(folder))


def load(folder: Path, learner: Learner) -> None:
    """Read what `save` wrote, in place. Raises DataError naming what the checkpoint lacks or what differs."""
    if not (folder / ".metadata").is_file():
        raise DataError(f"checkpoint {folder} is not complete: it has no .metadata file")
    with learner.offload.loaded():
        _check_fit(folder, learner.module)
    assert learner.stepper is not None
    optimizer = learner.stepper.optimizer
    with learner.offload.loaded(optimizer=True):
        state = _state(learner)
        _read(folder, state)
        for group, own in zip(state["optimizer"]["param_groups"], optimizer.param_groups, strict=True):
            group |= {name: own[name] for name in _KERNEL if name in own}
        set_state_dict(
            learner.module,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=False),  # frozen ones stay; all others were read, or it would have failed
        )
    learner.steps_taken = state["counters"]["steps_taken"]
    learner.skipped_steps = state["counters"]["skipped_steps"]


def _check_fit(folder: Path, module: nn.Module) -> None:
    """Refuse a checkpoint of other adapters or over other frozen weights. A collective.

    Versions before there were adapters said nothing of either: what they wrote fits a model that learns as a whole.
    """
    mine = _fits(module)
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    lacking = [what for what in mine if f"{_FITS}.{what}" not in stored]
    if not lacking:
        found = {_FITS: dict(mine)}
        _read(folder, found)
        for what, value in mine.items():
            if found[_FITS][what] != value:
                raise DataError(
                    f"checkpoint {folder} does not fit this model: {what} is {value} here, {found[_FITS][what]} there"
                )
    elif not all(parameter.requires_grad for parameter in module.parameters()):
        raise DataError(
            f"checkpoint {folder} is of an older version and does not say whether it fits this model, of which a part "
            f"is frozen: it has no entry '{_FITS}.{lacking[0]}'"
        )


def _read(folder: Path, state: dict[str, Any]) -> None:
    """Read into `state`, in place. Raises DataError with one line that names the first entry missing or different."""
    try:
        state_dict_loader.load(state, checkpoint_id=str(folder))
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]  # of one rank; as text the error is the tracebacks of all
        raise DataError(f"checkpoint {folder} does not fit this model and optimizer: {cause}") from error
    except (RuntimeError, ValueError) as error:
        raise DataError(f"checkpoint {folder} does not fit this model and optimizer: {error}") from error


def _state(learner: Learner) -> dict[str, Any]:
    assert learner.stepper is not None, "a frozen module has no checkpoint"
    model, optimizer = get_state_dict(learner.module, learner.stepper.optimizer)
    frozen = {name for name, p in learner.module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    counters = {"steps_taken": learner.steps_taken, "skipped_steps": learner.skipped_steps}
    trained = {name: tensor for name, tensor in model.items() if name not in frozen}
    return {"model": trained, "optimizer": optimizer, "counters": counters}


def _fits(module: nn.Module) -> dict[str, str]:
    """Return what must be equal where the checkpoint is read, by what it is called in a message."""
    return {"LoRA": lora.summary(module), "the fingerprint of the frozen weights": _fingerprint(module)}


def _fingerprint(module: nn.Module) -> str:
    """Return a hash of the frozen parameters, the same however they are sharded. A collective."""
    digest = hashlib.sha256()
    frozen = [
        (name, parameter.detach()) for name, parameter in module.named_parameters() if not parameter.requires_grad
    ]
    for name, tensor in frozen:
        if isinstance(tensor, DTensor):  # sharded on the last axis of the mesh
            total = _sum_of_bits(tensor.to_local())
            dist.all_reduce(total, group=tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1))
        else:
            total = _sum_of_bits(tensor)
        digest.update(f"{name} {tuple(tensor.shape)} {int(total) % _MODULUS};".encode())
    return digest.hexdigest()[:16] if frozen else "none"


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of the elements, each read as a whole number, modulo a number that keeps later sums exact."""
    return tensor.contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64).remainder(_MODULUS)
