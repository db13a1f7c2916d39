"""The code sandbox of a reward process. The process's program says once how to get one; rules ask when they need it."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final, final

from vrl.agent.rewards.types import RewardSpec
from vrl.agent.sandbox.types import ProgramRunner
from vrl.protocol.config.sandbox import SandboxConfig
from vrl.protocol.errors import ConfigError

_OUTPUT_CHARS: Final = 1 << 20  # a model is shown far less


@final
class _Provider:
    def __init__(self) -> None:
        self.make: Callable[[], ProgramRunner] | None = None
        self.runner: ProgramRunner | None = None
        self.seconds = math.inf


_provider = _Provider()


def grading_sandbox(spec: RewardSpec) -> SandboxConfig:
    """Return the sandbox of rules: all that a program prints is compared, and two slow cells fit in a request."""
    config, limit = spec.sandbox, spec.time_limit_seconds
    chars = max(config.output_chars, _OUTPUT_CHARS)
    return replace(config, output_chars=chars, cell_seconds=min(config.cell_seconds, limit / 3))


def provide_code_runner(make: Callable[[], ProgramRunner] | None, seconds: float = math.inf) -> None:
    """Say how a sandbox is made, and how long one row's code may run there; None takes it back.

    It is made when the first row needs it. No cell is started once a row's cells have run for so many seconds.
    """
    _provider.make, _provider.runner, _provider.seconds = make, None, seconds


def code_seconds() -> float:
    """Return how long the cells of one row may run in all before no other is started."""
    return _provider.seconds


def code_runner() -> ProgramRunner:
    """Return the process's sandbox. Raises ConfigError where there is none."""
    if _provider.runner is None:
        if _provider.make is None:
            raise ConfigError("this data source runs code, and this process has no code sandbox")
        _provider.runner = _provider.make()
    return _provider.runner
