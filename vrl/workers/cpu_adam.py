"""DeepSpeed's CPU Adam over sharded parameters: the optimizer's state lives in host memory, and steps are taken there.

Imported only where `optim.optimizer` asks for it. The first use compiles the kernel (g++, about a minute of one core);
torch keeps it in TORCH_EXTENSIONS_DIR.
"""

import os
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any, Final, final

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.cpp_extension import _get_build_directory  # the folder has no public name

_KERNEL: Final = "cpu_adam"  # DeepSpeed's name, and that of the folder where torch builds it
_HOST: Final = torch.device("cpu")
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


@final
class ShardedCPUAdam(DeepSpeedCPUAdam):
    """AdamW by DeepSpeed's kernel, a rank's shard at a time.

    DeepSpeed's own `step` hands whole tensors to the kernel by address, which a sharded parameter does not have.
    From a GPU a parameter and its gradient are copied to the host for a step, and the new values back. State has the
    names and the sharding of AdamW's, so that checkpoints can be read at any world size.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], **settings: Any) -> None:
        """`settings`: lr, betas, decoupled weight_decay. Raises RuntimeError when the kernel cannot be compiled."""
        with _sole_builder():
            super().__init__(parameters, adamw_mode=True, **settings)
        self.register_load_state_dict_post_hook(_moments_to_host)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002 - torch's checkpoints pass it
        """Update every parameter that has a gradient."""
        # The kernel multiplies powers of beta up from step to step, and computes those of the first step it sees. Made
        # anew it always computes them, or a resumed run would differ in the last bit. An update brings all values.
        self.ds_opt_adam.create_adam(self.opt_id, 0.0, 0.0, 0.0, 0.0, 0.0, True, False)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, parameter.grad)

    def _update(self, group: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state |= {name: torch.zeros_like(parameter).to(_HOST) for name in _MOMENTS}
        state["step"] += 1
        on_device = _local(parameter)
        on_host = on_device.to(_HOST)
        self.ds_opt_adam.adam_update(
            self.opt_id,
            int(state["step"]),
            group["lr"],
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["bias_correction"],
            on_host,
            _local(grad).to(_HOST),
            *(_local(state[name]) for name in _MOMENTS),
        )
        if on_host is not on_device:
            on_device.copy_(on_host)


@contextmanager
def _sole_builder() -> Iterator[None]:
    """Let one process at a time find or compile the kernel.

    torch has a lock file for that, but one that a killed build leaves behind would be waited for without end.
    """
    if shutil.which("ninja") is None:  # its package puts it beside Python, which need not be on PATH
        os.environ["PATH"] += os.pathsep + sysconfig.get_path("scripts")
    folder = Path(_get_build_directory(_KERNEL, verbose=False))
    with (folder / "builder").open("w") as builder:
        flock(builder, LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _moments_to_host(optimizer: torch.optim.Optimizer) -> None:
    """Undo what torch's loading does: it puts state where the parameters are."""
    for state in optimizer.state.values():
        state |= {name: state[name].to(_HOST) for name in _MOMENTS}
