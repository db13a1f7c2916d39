"""The code sandbox of a reward process. The process's program says once how to get one; rules ask when they need it."""

from collections.abc import Callable
from typing import final

from vrl.agent.sandbox.types import CodeRunner
from vrl.protocol.errors import ConfigError


@final
class _Provider:
    def __init__(self) -> None:
        self.make: Callable[[], CodeRunner] | None = None
        self.runner: CodeRunner | None = None


_provider = _Provider()


def provide_code_runner(make: Callable[[], CodeRunner] | None) -> None:
    """Say how a sandbox is made; it is made when the first row needs it. None takes it back."""
    _provider.make, _provider.runner = make, None


def code_runner() -> CodeRunner:
    """Return the process's sandbox. Raises ConfigError where there is none."""
    if _provider.runner is None:
        if _provider.make is None:
            raise ConfigError("this data source runs code, and this process has no code sandbox")
        _provider.runner = _provider.make()
    return _provider.runner
