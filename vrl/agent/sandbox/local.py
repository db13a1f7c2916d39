"""Code runner on this machine: a pool of ready interpreters behind bubblewrap (or, when asked for, limits alone).

    keeper thread: starts the zygote, keeps `pool_size` interpreters ready, starts a new zygote when one fails
    session():     takes a ready one;  run(): one exchange with it;  close(): kills it

The keeper lives as long as the runner, because the kernel ends a sandbox together with the thread that started it.
"""

import io
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, final

import PIL.Image

from vrl.agent.sandbox.interpreters import Ending, Exchange, Interpreter
from vrl.agent.sandbox.program import run_alone
from vrl.agent.sandbox.types import CellResult
from vrl.agent.sandbox.zygotes import KIND, Zygote
from vrl.protocol.config.sandbox import SandboxConfig
from vrl.protocol.errors import SandboxError

_LOG = logging.getLogger(__name__)
_TAKE_SECONDS = 120.0
_LOAD_SECONDS = 10.0
_NEW_STARTS = 2
_MAX_CODE_CHARS = 200_000
_LOST = "its variables are lost"


@final
class LocalRunner:
    """Sessions in sandboxes of this machine; `session` and `close` may be called from several threads."""

    def __init__(self, config: SandboxConfig) -> None:
        """Begin to start the sandbox in the background; the first session waits for it."""
        if config.kind == "rlimits":
            _LOG.warning(
                "%s=rlimits: code runs with limits, but WITHOUT A SANDBOX: it can read the files of this user",
                KIND,
            )
        self._config = config
        self._changed = threading.Condition()
        self._ready: deque[Interpreter] = deque()
        self._failure: SandboxError | None = None
        self._closing = False
        self._zygote: Zygote | None = None
        self._sessions: set[LocalSession] = set()
        self._keeper = threading.Thread(target=self._keep, name="vrl-sandbox", daemon=True)
        self._keeper.start()

    def __enter__(self) -> "LocalRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def session(self, images: Sequence[bytes] = ()) -> "LocalSession":
        """Return a new interpreter with the images in it. Raises SandboxError when none can be had."""
        session = LocalSession(self, self._config, images)
        with self._changed:
            self._sessions.add(session)
        return session

    def run_program(self, code: str, standard_input: str = "") -> CellResult:
        """Run a whole program in an interpreter of its own."""
        return run_alone(self, code, standard_input)

    def close(self) -> None:
        """End all sessions and the sandbox."""
        with self._changed:
            self._closing = True
            sessions = list(self._sessions)
            self._changed.notify_all()
        for session in sessions:
            session.close()
        self._keeper.join()

    def process_ids(self) -> list[int]:
        """Return the process id of the sandbox, whose descendants are all interpreters, for accounting."""
        zygote = self._zygote
        return [] if zygote is None else [zygote.process_id]

    def take(self) -> Interpreter:
        """Return a ready interpreter, for a session. Raises SandboxError when there is none within two minutes."""
        deadline = time.monotonic() + _TAKE_SECONDS
        with self._changed:
            self._failure = None
            self._changed.notify_all()
            while not self._ready:
                if self._failure is not None:
                    raise SandboxError(str(self._failure))
                if self._closing or not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise SandboxError("the code runner is closed" if self._closing else "no interpreter became ready")
            interpreter = self._ready.popleft()
            self._changed.notify_all()
            return interpreter

    def forget(self, session: "LocalSession") -> None:
        """Called by a session that is closed."""
        with self._changed:
            self._sessions.discard(session)

    def _keep(self) -> None:
        """Keep the pool full until `close`; what goes wrong is told to those who wait for an interpreter."""
        tries = 0  # left before a failure is told; none before the first interpreter
        while self._wait_for_room():
            try:
                self._zygote = self._zygote or Zygote(self._config)
                interpreter = self._zygote.spawn()
            except SandboxError as error:
                self._end_zygote()
                tries -= 1
                if tries < 0:
                    self._tell(error)
                else:
                    _LOG.warning("the code sandbox is started anew: %s", error)
                continue
            tries = _NEW_STARTS
            with self._changed:
                self._ready.append(interpreter)
                self._changed.notify_all()
        while self._ready:
            self._ready.popleft().end()
        self._end_zygote()

    def _end_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def _wait_for_room(self) -> bool:
        with self._changed:
            while not self._closing and (self._failure is not None or len(self._ready) >= self._config.pool_size):
                self._changed.wait()
            return not self._closing

    def _tell(self, failure: SandboxError) -> None:
        with self._changed:
            self._failure = failure
            self._changed.notify_all()


@final
class LocalSession:
    """One episode's interpreter; a new one takes its place when a cell has ended it."""

    def __init__(self, runner: LocalRunner, config: SandboxConfig, images: Sequence[bytes]) -> None:
        self._runner = runner
        self._config = config
        self._images = list(images)
        self._interpreter: Interpreter | None = None
        self._in_use = threading.Lock()
        self._closed = False

    def run(self, code: str) -> CellResult:
        """Run a cell. Raises SandboxError when no interpreter can be had."""
        if len(code) > _MAX_CODE_CHARS:
            return CellResult(error=f"a cell may have {_MAX_CODE_CHARS} characters, this one has {len(code)}")
        with self._in_use:
            if self._closed:
                raise SandboxError("the session is closed")
            if self._interpreter is None:
                self._interpreter = self._begin()
            exchange = self._interpreter.exchange({"code": code}, [], self._config.cell_seconds)
            images = _encode_images(exchange, self._config)
            if exchange.ending is Ending.ANSWERED and images is not None:
                return self._answer(exchange, images)
            self._interpreter.end()
            self._interpreter = None
            return self._lost(exchange)

    def process_ids(self) -> list[int]:
        """Return the process id of the interpreter on this machine, for accounting."""
        interpreter = self._interpreter
        return [] if interpreter is None else [interpreter.process_id]

    @property
    def busy(self) -> bool:
        """Whether a cell runs."""
        return self._in_use.locked()

    def close(self) -> None:
        """End the interpreter; a cell that still runs ends with it."""
        interpreter = self._interpreter
        if interpreter is not None:
            interpreter.kill()
        with self._in_use:
            self._closed = True
            if self._interpreter is not None:
                self._interpreter.end()
                self._interpreter = None
        self._runner.forget(self)

    def _begin(self) -> Interpreter:
        interpreter = self._runner.take()
        if self._images:
            exchange = interpreter.exchange({}, self._images, _LOAD_SECONDS)
            problem = exchange.answer.get("error") if exchange.ending is Ending.ANSWERED else exchange.ending.name
            if problem is not None:
                interpreter.end()
                raise SandboxError(f"the images of a prompt cannot be loaded in the code sandbox: {problem}")
        return interpreter

    def _answer(self, exchange: Exchange, images: tuple[bytes, ...]) -> CellResult:
        error = exchange.answer.get("error")
        text = None if error is None else str(error)[: self._config.output_chars]
        if exchange.interrupted:
            note = f"TimeoutError: the cell was interrupted after {self._config.cell_seconds:g} s; variables are kept"
            text = note if text is None else f"{text}\n{note}"
        left_out = exchange.answer.get("left_out")
        output = self._output(exchange)
        if type(left_out) is int and left_out > 0:
            output += f"[{left_out} more images are not shown; a cell may show {self._config.images}]\n"
        return CellResult(output=output, error=text, images=images, seconds=exchange.seconds)

    def _lost(self, exchange: Exchange) -> CellResult:
        config = self._config
        reason = {
            Ending.DIED: f"the interpreter ended before the cell did; {_LOST}",
            Ending.TIME: f"TimeoutError: the cell went on after {config.cell_seconds:g} s, interrupted or not; {_LOST}",
            Ending.MEMORY: f"MemoryError: the cell used more than {config.memory_mib} MiB; {_LOST}",
            Ending.PROCESSES: f"the cell started or left behind more processes than are allowed; {_LOST}",
            Ending.FLOOD: f"the cell printed far too much; {_LOST}",
        }.get(exchange.ending, f"the interpreter gave no proper answer; {_LOST}")
        return CellResult(output=self._output(exchange), error=reason, seconds=exchange.seconds, lost=True)

    def _output(self, exchange: Exchange) -> str:
        limit = self._config.output_chars
        text = exchange.output.decode(errors="replace")
        if len(text) <= limit and exchange.output_bytes <= len(exchange.output):
            return text
        return f"{text[:limit]}\n[the output was cut here; the cell printed {exchange.output_bytes} bytes]\n"


def _encode_images(exchange: Exchange, config: SandboxConfig) -> tuple[bytes, ...] | None:
    """Return the pixels that came as PNG; None when sizes and pixels do not belong together."""
    sizes: Any = exchange.answer.get("sizes", [])
    pixels = exchange.pixels
    if not isinstance(sizes, list) or len(sizes) != len(pixels) or len(pixels) > config.images:
        return None
    images: list[bytes] = []
    for size, data in zip(sizes, pixels, strict=True):
        if not _is_size(size) or size[0] * size[1] > config.image_pixels or size[0] * size[1] * 3 != len(data):
            return None
        file = io.BytesIO()
        PIL.Image.frombytes("RGB", (size[0], size[1]), data).save(file, "PNG", compress_level=1)
        images.append(file.getvalue())
    return tuple(images)


def _is_size(size: Any) -> bool:
    return isinstance(size, list) and len(size) == 2 and all(type(length) is int and length > 0 for length in size)
