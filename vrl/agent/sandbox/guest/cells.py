"""One interpreter: runs cells that come over the channel, with the habits of a notebook.

The tool process trusts nothing of what this program says, since the code of a cell shares its memory: limits are held
from outside, and what comes back is bounded and checked there.
"""

import ast
import builtins
import contextlib
import io
import linecache
import os
import signal
import socket
import struct
import sys
import traceback
from types import CodeType, ModuleType
from typing import Any, final

import PIL.Image
import PIL.ImageOps
from matplotlib import pyplot
from matplotlib.figure import Figure

from vrl.agent.sandbox.guest.frames import FrameReader, encode_frame, read_frame
from vrl.agent.sandbox.guest.pictures import Pictures, opaque, take_over_show

_MAX_CODE_BYTES = 1 << 22
_MAX_INPUT_BYTES = 1 << 28
_OUTPUT_DESCRIPTORS = (1, 2)


@final
class Interpreter:
    """Variables that live from cell to cell."""

    def __init__(self, pictures: Pictures, output_chars: int, alone: bool) -> None:
        self._pictures = pictures
        self._output_chars = output_chars
        self._alone = alone  # process 1 of its own namespace: what a cell started can be ended
        self._process = os.getpid()
        self._cells = 0
        self._output = os.dup(_OUTPUT_DESCRIPTORS[0])
        self._main = ModuleType("__main__")  # so that classes of a cell can be pickled and found by name
        self.variables = vars(self._main)
        self.variables.update(__builtins__=builtins, display=self._show)

    def load_images(self, images: list[bytes]) -> None:
        """Write the images as image_1.png, ... and name them image_1, ...; their pixels are read when used.

        They are what the policy's model sees: RGB, upright, on white.
        """
        for number, data in enumerate(images, 1):
            name = f"image_{number}.png"
            with PIL.Image.open(io.BytesIO(data)) as image:
                opaque(PIL.ImageOps.exif_transpose(image)).save(name, "PNG", compress_level=1)
            self.variables[f"image_{number}"] = PIL.Image.open(name)

    def run(self, code: str) -> str | None:
        """Run one cell; return the end of its traceback, if any."""
        self._cells += 1
        self._pictures.begin()
        self._renew_output()
        sys.modules["__main__"] = self._main
        error = None
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                self._execute_and_show(code)
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        except SystemExit as end:
            error = None if end.code is None or (type(end.code) is int and not end.code) else self._describe(end)
        except BaseException as failure:  # noqa: BLE001 - whatever the code of a cell raises
            error = self._describe(failure)
        if os.getpid() != self._process:  # a child that the cell forked and that ran on to here
            os._exit(0 if error is None else 1)
        self._end_cell()
        return error

    def _execute_and_show(self, code: str) -> None:
        try:
            self._execute(code)
        except (Exception, SystemExit):  # not an interrupt, which leaves no time
            with contextlib.suppress(Exception):
                self._pictures.show_rest()
            raise
        self._pictures.show_rest()

    def _execute(self, code: str) -> None:
        name = f"<cell {self._cells}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        if tree.body:
            self._evaluate(compile(tree, name, "exec"))
        if isinstance(last, ast.Expr):
            value = self._evaluate(compile(ast.Expression(last.value), name, "eval"))
            self.variables["_"] = value
            self._show(value)

    def _evaluate(self, code: CodeType) -> Any:
        return eval(code, self.variables)  # also runs code of statements, and then gives None

    def _show(self, *values: Any) -> None:
        for value in values:
            if isinstance(value, PIL.Image.Image):
                self._pictures.show(value)
            elif isinstance(value, Figure):
                value.show()
            elif value is not None:
                text = repr(value)
                cut = text if len(text) <= self._output_chars else f"{text[: self._output_chars]}..."
                sys.stdout.write(f"{cut}\n")

    def _describe(self, failure: BaseException) -> str:
        """Return the traceback without our own frames and those of libraries."""
        try:
            frames = traceback.extract_tb(failure.__traceback__)
            own = [frame for frame in frames if frame.filename.startswith("<cell ")]
            text = "".join([*traceback.format_list(own[-8:]), *traceback.format_exception_only(failure)])
            return text.rstrip()[-self._output_chars :]
        except BaseException:  # noqa: BLE001 - an exception class of the cell with a trap in it
            return type(failure).__name__

    def _renew_output(self) -> None:
        """Give the cell fresh streams, also when the last one closed or replaced them."""
        for descriptor in _OUTPUT_DESCRIPTORS:
            os.dup2(self._output, descriptor)
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - the cell's until the next one begins
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(
                io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False)),
                encoding="utf-8",
                errors="backslashreplace",
                line_buffering=True,
            )
            for descriptor in _OUTPUT_DESCRIPTORS
        )

    def _end_cell(self) -> None:
        """Flush, and end what the cell has started; a thread stays, and sleeps until the next cell."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        with contextlib.suppress(Exception):
            pyplot.close("all")
        if not self._alone:
            return
        with contextlib.suppress(OSError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(OSError):
            while True:
                os.waitpid(-1, 0)


def serve(channel: socket.socket, interpreter: Interpreter, pictures: Pictures) -> None:
    """Answer requests until the tool process is gone."""
    take_over_show(pictures)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while (frame := read_frame(channel, FrameReader(_MAX_CODE_BYTES, _MAX_INPUT_BYTES))) is not None:
        request, blobs = frame
        error = interpreter.run(request["code"]) if "code" in request else _load(interpreter, blobs)
        sizes = [[width, height] for width, height, _ in pictures.shown]
        answer = {"id": request["id"], "error": error, "sizes": sizes, "left_out": pictures.left_out}
        channel.sendall(encode_frame(answer, [pixels for _, _, pixels in pictures.shown]))


def _load(interpreter: Interpreter, images: list[bytes]) -> str | None:
    try:
        interpreter.load_images(images)
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, PIL.Image.DecompressionBombError) as error:
        return f"{type(error).__name__}: {error}"
    return None
