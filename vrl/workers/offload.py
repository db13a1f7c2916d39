"""Parameters and optimizer state in host memory while a role is idle, so that the device has room for the others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

_HOST = torch.device("cpu")


@final
class Offload:
    """Brings a sharded module and its optimizer to the device where they are used, and takes them back afterwards.

    Gradients exist only inside an update, so they never travel. Values are copied bit by bit: results are those of a
    role that stays. Each rank moves its own shards; nothing is communicated.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        *,
        parameters: bool,
        state: bool,
    ) -> None:
        """`parameters` and `state` say what leaves the device; both at once from now on."""
        self._module = module
        self._optimizer = optimizer if state else None
        self._device = device
        self._parameters = parameters
        self._users = 0
        self._rest()

    @contextmanager
    def loaded(self, *, optimizer: bool = False) -> Iterator[None]:
        """Keep the parameters on the device inside the block, and the optimizer's state too when `optimizer` is set.

        Blocks may be nested; an inner one does not bring an optimizer that the outer one left behind.
        """
        if self._users == 0:
            if self._parameters:
                self._module.to(self._device)
            if optimizer:
                self._move_state(self._device)
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self._rest()

    def _rest(self) -> None:
        if self._parameters:
            self._module.to(_HOST)
        self._move_state(_HOST)
        if self._device.type == "cuda" and (self._parameters or self._optimizer is not None):
            torch.cuda.empty_cache()  # the engine takes its memory from the driver, not from torch

    def _move_state(self, device: torch.device) -> None:
        if self._optimizer is None:
            return
        for entries in self._optimizer.state.values():
            for name, value in entries.items():
                if isinstance(value, Tensor) and name != "step":  # a counter, which AdamW keeps on the host
                    entries[name] = _moved(value, device)


def _moved(tensor: Any, device: torch.device) -> Tensor:
    return tensor if tensor.device == device else tensor.to(device)
