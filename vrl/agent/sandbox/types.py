"""What runs a model's code, as tools and rewards see it: sessions that keep their variables between cells."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What one cell printed, showed and how it ended."""

    output: str = ""  # stdout and stderr in order, and the value of a last expression; cut at the limit
    error: str | None = None  # the last lines of a traceback, or the limit that was hit; None when the cell ended well
    images: tuple[bytes, ...] = ()  # PNG, in the order in which they were shown or saved
    seconds: float = 0.0
    lost: bool = False  # the interpreter is gone with its variables; the next cell starts a new one


class CodeSession(Protocol):
    """One episode's interpreter."""

    def run(self, code: str) -> CellResult:
        """Run a cell. Whatever the code does is in the result; raises SandboxError only when no sandbox can be had."""
        ...

    def close(self) -> None:
        """End the interpreter and remove all that it left."""
        ...


class CodeRunner(Protocol):
    """Makes sessions; safe to use from several threads."""

    def session(self, images: Sequence[bytes] = ()) -> CodeSession:
        """Return a new interpreter. `images` are there as files `image_1.png`, ... and variables `image_1`, ..."""
        ...

    def close(self) -> None:
        """End all sessions and the warm processes."""
        ...


class ProgramRunner(CodeRunner, Protocol):
    """Runs whole programs too, as graders of code do."""

    def run_program(self, code: str, standard_input: str = "") -> CellResult:
        """Run a Python program once; `output` is its standard output.

        `error` is set when it ends with an exception or another exit status than 0, or at a limit. Raises SandboxError
        only when no sandbox can be had.
        """
        ...
