"""A code runner for tests: cells run in this process, with variables that live as long as the session does."""

import contextlib
import io
import traceback
from collections.abc import Sequence
from typing import Any, final

from PIL import Image

from vrl.agent.sandbox.program import run_alone
from vrl.agent.sandbox.types import CellResult


@final
class InProcessSession:
    def __init__(self, runner: "InProcessRunner", images: Sequence[bytes]) -> None:
        self._runner = runner
        self._shown: list[bytes] = []
        self._scope: dict[str, Any] = {"show": self._show, "__name__": "__main__"}
        for number, data in enumerate(images, 1):
            self._scope[f"image_{number}"] = Image.open(io.BytesIO(data))
        runner.open_sessions += 1

    def _show(self, image: Image.Image) -> None:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        self._shown.append(buffer.getvalue())

    def run(self, code: str) -> CellResult:
        printed, self._shown[:] = io.StringIO(), []
        error = None
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile(code, "<cell>", "exec"), self._scope)
            except BaseException:  # noqa: BLE001 - whatever code does
                error = "\n".join(traceback.format_exc().splitlines()[-1:])
        seconds = self._runner.cell_seconds
        return CellResult(output=printed.getvalue(), error=error, images=tuple(self._shown), seconds=seconds)

    def close(self) -> None:
        self._runner.open_sessions -= 1


@final
class InProcessRunner:
    def __init__(self, cell_seconds: float = 0.01) -> None:
        self.open_sessions = 0
        self.cell_seconds = cell_seconds  # what a cell is said to have taken

    def session(self, images: Sequence[bytes] = ()) -> InProcessSession:
        return InProcessSession(self, images)

    def run_program(self, code: str, standard_input: str = "") -> CellResult:
        return run_alone(self, code, standard_input)

    def close(self) -> None:
        assert not self.open_sessions
