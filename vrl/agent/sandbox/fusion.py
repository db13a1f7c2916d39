"""Code runner on a Sandbox Fusion server (bytedance/SandboxFusion: POST /run_jupyter and /run_code, JSON both ways).

The server keeps nothing between requests. A session sends all its cells so far each time and keeps the answer to the
last: variables are the same as in a notebook, but what earlier cells do happens again, their random numbers too, and
the time of a request grows with them. Cells that failed are sent again guarded, cells that ran out of time are not.
Images come back when a cell shows them; image files that it saves stay on the server.
"""

import base64
import binascii
import http.client
import io
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, final

import PIL.Image

from vrl.agent.sandbox.types import CellResult
from vrl.agent.tools.pictures import PictureError, as_png, open_picture
from vrl.protocol.config.sandbox import SandboxConfig
from vrl.protocol.errors import SandboxError

_LOG = logging.getLogger(__name__)
_TRIES = 4
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 8.0
_RETRIED_STATUS = frozenset({429, 500, 502, 503, 504})
_MAX_ANSWER_BYTES = 64 << 20
_KERNEL_START_SECONDS = 15.0
_NETWORK_SECONDS = 10.0
_TIME_OVER = "TimeLimitExceeded"

Json = dict[str, Any]


@final
class FusionClient:
    """Requests to one server: at most `rate` a second from this process, each tried up to four times.

    Waiting for the rate limit counts against no time limit.
    """

    def __init__(self, url: str, rate: float, first_pause_seconds: float = _FIRST_PAUSE_SECONDS) -> None:
        self._url = url.rstrip("/")
        self._interval_seconds = 1.0 / rate
        self._first_pause_seconds = first_pause_seconds
        self._lock = threading.Lock()
        self._next_start = 0.0

    def post(self, path: str, body: Json, seconds: float) -> tuple[Json, float]:
        """Return the server's answer, and the seconds of the try that brought it.

        Raises SandboxError when all tries fail or the request is refused.
        """
        pause, problem = self._first_pause_seconds, ""
        for attempt in range(_TRIES):
            if attempt:
                _LOG.warning("%s%s: %s; tried again in %.1f s", self._url, path, problem, pause)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self._wait_for_turn()
            began = time.monotonic()
            try:
                answer = self._send(path, body, seconds)
            except urllib.error.HTTPError as error:
                problem = f"HTTP status {error.code}"
                if error.code not in _RETRIED_STATUS:
                    break
                continue
            except (
                OSError,
                http.client.HTTPException,
                ValueError,
            ) as error:  # no connection, cut off, over its time, no JSON
                problem = f"{type(error).__name__}: {error}"
                continue
            if answer.get("status") != "SandboxError":
                return answer, time.monotonic() - began
            problem = f"the server reports {str(answer.get('message'))[:500]}"
        raise SandboxError(f"the Sandbox Fusion server {self._url}{path} gives no answer: {problem}")

    def _wait_for_turn(self) -> None:
        with self._lock:
            start = max(time.monotonic(), self._next_start)
            self._next_start = start + self._interval_seconds
        time.sleep(max(0.0, start - time.monotonic()))

    def _send(self, path: str, body: Json, seconds: float) -> Json:
        request = urllib.request.Request(
            self._url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=seconds + _NETWORK_SECONDS) as response:
            data = response.read(_MAX_ANSWER_BYTES + 1)
        if len(data) > _MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
        answer = json.loads(data)
        if not isinstance(answer, dict):
            raise ValueError("an answer that is no JSON object")
        return answer


@final
class FusionRunner:
    """Sessions and single programs on a Sandbox Fusion server; to be used from several threads."""

    def __init__(self, config: SandboxConfig, first_pause_seconds: float = _FIRST_PAUSE_SECONDS) -> None:
        """Nothing is sent yet. Raises SandboxError without an address."""
        if config.url is None:
            raise SandboxError("actor_rollout_ref.rollout.multi_turn.sandbox.kind=remote needs ...sandbox.url")
        self._config = config
        self._client = FusionClient(config.url, config.rate, first_pause_seconds)

    def session(self, images: Sequence[bytes] = ()) -> "FusionSession":
        """Return a session; the server hears of it with its first cell."""
        return FusionSession(self._client, self._config, images)

    def run_program(self, code: str, standard_input: str = "") -> CellResult:
        """Run a whole Python program once; the error of one that fails has the last line of its standard error."""
        config = self._config
        body = {
            "code": code,
            "language": "python",
            "stdin": standard_input,
            "run_timeout": config.cell_seconds,
            "memory_limit_MB": config.memory_mib,
        }
        answer, waited = self._client.post("/run_code", body, config.cell_seconds)
        result = _object(answer.get("run_result"))
        output, error = _text(result.get("stdout")), None
        if result.get("status") == _TIME_OVER:
            error = f"TimeoutError: the program ran over {config.cell_seconds:g} s"
        elif answer.get("status") != "Success":
            last_line = (_text(result.get("stderr")).strip().splitlines() or [""])[-1][: config.output_chars]
            error = f"the program ended with exit code {result.get('return_code')}: {last_line}"
        output = _cut(output, config.output_chars)
        return CellResult(output=output, error=error, seconds=_run_seconds(result, waited), lost=True)

    def close(self) -> None:
        """Nothing is held."""


@final
class FusionSession:
    """All cells of one episode so far; each request runs them from the beginning."""

    def __init__(self, client: FusionClient, config: SandboxConfig, images: Sequence[bytes]) -> None:
        self._client = client
        self._config = config
        self._files = {f"image_{number}.png": _as_png(data) for number, data in enumerate(images, 1)}
        loads = [f"image_{number} = _open_image('image_{number}.png')" for number in range(1, len(images) + 1)]
        self._cells = (
            ["\n".join(["from PIL import Image as _image", "_open_image = _image.open", *loads])] if loads else []
        )
        self._replay_seconds = 0.0  # the last request's: start of the kernel and all cells

    def run(self, code: str) -> CellResult:
        """Run a cell after those before it. Raises SandboxError when the server cannot be used.

        `seconds` of the first cell has the start of the kernel in it.
        """
        config = self._config
        total = config.cell_seconds + 2 * self._replay_seconds + _KERNEL_START_SECONDS
        body = {
            "cells": [*self._cells, code],
            "cell_timeout": config.cell_seconds,
            "total_timeout": total,
            "memory_limit_MB": config.memory_mib,
            "kernel": "python3",
            "files": self._files,
            "fetch_files": [],
        }
        answer, waited = self._client.post("/run_jupyter", body, total)
        with_replay = _run_seconds(_object(answer.get("driver")), waited)
        seconds = max(0.0, with_replay - self._replay_seconds)
        cells = answer.get("cells")
        if answer.get("status") != "Success" or not isinstance(cells, list) or len(cells) != len(self._cells) + 1:
            return CellResult(error=self._driver_error(answer), seconds=seconds)
        result = self._read(_object(cells[-1]), seconds)
        self._cells.append(code if result.error is None else _guarded(code))
        self._replay_seconds = with_replay
        return result

    def close(self) -> None:
        """Nothing is held."""

    def _driver_error(self, answer: Json) -> str:
        driver = _object(answer.get("driver"))
        if driver.get("status") == _TIME_OVER:
            return f"TimeoutError: the cell ran over {self._config.cell_seconds:g} s; variables are as before it"
        tail = _text(driver.get("stderr")).strip().splitlines()[-1:] or ["the kernel ended"]
        return f"{tail[0][: self._config.output_chars]}; variables are as before the cell"

    def _read(self, cell: Json, seconds: float) -> CellResult:
        config = self._config
        output, images = f"{_text(cell.get('stdout'))}{_text(cell.get('stderr'))}", list[bytes]()
        for shown in _list(cell.get("display")):
            bundle = _object(shown)
            image = bundle.get("image/png")
            if isinstance(image, str) and len(images) < config.images:
                images += _checked_image(image, config.image_pixels)
            elif image is None and "text/plain" in bundle:
                output += f"{_text(bundle['text/plain'])}\n"
        errors = [_object(error) for error in _list(cell.get("error"))]
        error = f"{_text(errors[-1].get('ename'))}: {_text(errors[-1].get('evalue'))}" if errors else None
        return CellResult(
            output=_cut(output, config.output_chars),
            error=None if error is None else error[: config.output_chars],
            images=tuple(images),
            seconds=seconds,
        )


def _guarded(code: str) -> str:
    """Return a cell that does what a failed one did and goes on."""
    return f"try:\n    exec(compile({code!r}, '<cell>', 'exec'), globals())\nexcept BaseException:\n    pass"


def _as_png(data: bytes) -> str:
    """Return an image file as a PNG of what the policy's model sees, base64. Raises SandboxError when it is none."""
    try:
        return base64.b64encode(as_png(open_picture(data))).decode()
    except PictureError as error:
        raise SandboxError(f"an image of a prompt cannot be sent to the code sandbox: {error}") from error


def _checked_image(encoded: str, max_pixels: int) -> list[bytes]:
    """Return the image as a PNG of our own making, made smaller if need be; nothing when it is none."""
    try:
        with PIL.Image.open(io.BytesIO(base64.b64decode(encoded)), formats=("PNG",)) as image:
            if image.width * image.height > 16 * max_pixels:
                return []
            picture = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, binascii.Error, PIL.Image.DecompressionBombError):
        return []
    if picture.width * picture.height > max_pixels:
        factor = (max_pixels / (picture.width * picture.height)) ** 0.5
        picture = picture.resize((max(1, int(picture.width * factor)), max(1, int(picture.height * factor))))
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return [file.getvalue()]


def _run_seconds(result: Json, waited: float) -> float:
    """Return how long the code ran by the server's clock; where that says nothing, how long its answer took."""
    told = result.get("execution_time")
    return float(told) if isinstance(told, int | float) and 0.0 <= told <= waited else waited


def _object(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}\n[the output was cut here; it has {len(text)} characters]\n"
