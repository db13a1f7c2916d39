"""A small server that speaks Sandbox Fusion's protocol and runs the code, for the tests of the client.

It answers POST /run_code and /run_jupyter with the field names of bytedance/SandboxFusion. `failures` is what it does
wrong first: HTTP status codes, "cut" (ends the connection), "sandbox" (its own error status), "slow" (answers late) or
"no clock" (late, and without saying how long the code ran).
"""

import base64
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, final

LATE_SECONDS = 0.2
KERNEL = """
import ast, base64, contextlib, io, json, sys
from PIL import Image
request = json.load(open("request.json"))
space, cells = {"__name__": "__main__"}, []
def shown(value):
    if isinstance(value, Image.Image):
        file = io.BytesIO()
        value.save(file, "PNG")
        return {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": "<image>"}
    return {"text/plain": repr(value)}
for code in request["cells"]:
    out, err, display, error = io.StringIO(), io.StringIO(), [], []
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            tree = ast.parse(code)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<cell>", "exec"), space)
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), space) if last else None
            if value is not None:
                display.append(shown(value))
        except Exception as failure:
            error.append({"ename": type(failure).__name__, "evalue": str(failure), "traceback": []})
    cells.append({"stdout": out.getvalue(), "stderr": err.getvalue(), "display": display, "error": error})
    if error:
        break  # what a kernel may do: the client has to cope with both
json.dump(cells, open("answer.json", "w"))
"""


@final
class FusionServer(ThreadingHTTPServer):
    """Holds what was asked, and what to do wrong first."""

    daemon_threads = True

    def __init__(self, failures: tuple[int | str, ...] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.failures = list(failures)
        self.requests: list[tuple[float, str, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@final
class _Handler(BaseHTTPRequestHandler):
    server: FusionServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((time.monotonic(), self.path, body))
        failure = self.server.failures.pop(0) if self.server.failures else None
        if failure == "cut":
            self.connection.close()
            return
        if isinstance(failure, int):
            self.send_error(failure)
            return
        if failure == "sandbox":
            answer: dict[str, Any] = {"status": "SandboxError", "message": "no pod is free"}
        else:
            answer = run_jupyter(body) if self.path == "/run_jupyter" else run_code(body)
        if failure in ("slow", "no clock"):
            time.sleep(LATE_SECONDS)
        if failure == "no clock":
            answer.get("run_result", answer.get("driver", {})).pop("execution_time")
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def command(program: str, seconds: float, folder: str, standard_input: str = "") -> dict[str, Any]:
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=standard_input,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {
            "status": "TimeLimitExceeded",
            "execution_time": seconds,
            "return_code": None,
            "stdout": "",
            "stderr": "",
        }
    return {
        "status": "Finished",
        "execution_time": time.monotonic() - began,
        "return_code": done.returncode,
        "stdout": done.stdout,
        "stderr": done.stderr,
    }


def run_code(body: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = command(body["code"], body["run_timeout"], folder, body.get("stdin") or "")
    well = result["status"] == "Finished" and result["return_code"] == 0
    return {"status": "Success" if well else "Failed", "message": "", "run_result": result, "files": {}}


def run_jupyter(body: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in body["files"].items():
            (Path(folder) / name).write_bytes(base64.b64decode(content))
        (Path(folder) / "request.json").write_text(json.dumps(body))
        driver = command(KERNEL, min(body["total_timeout"], body["cell_timeout"] + 1), folder)
        answer = Path(folder) / "answer.json"
        if driver["status"] != "Finished" or not answer.exists():
            return {"status": "Failed", "message": "", "driver": driver, "cells": [], "files": {}}
        return {
            "status": "Success",
            "message": "",
            "driver": driver,
            "cells": json.loads(answer.read_text()),
            "files": {},
        }


@contextmanager
def serving(*failures: int | str) -> Iterator[FusionServer]:
    with FusionServer(failures) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
