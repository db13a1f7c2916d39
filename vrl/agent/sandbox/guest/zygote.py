"""The first process in the sandbox: imports what cells use once, then forks an interpreter for each session.

Started as `zygote.py SETTINGS` with the control socket as standard input. Each message there is the working folder of
a new session and brings two descriptors, its channel and the pipe for its output. No cell ever runs in this process.
"""

import contextlib
import gc
import io
import json
import os
import shutil
import signal
import site
import socket
import sys
from typing import Any

import matplotlib
import numpy
import PIL.Image
from matplotlib import pyplot

from vrl.agent.sandbox.guest import fence
from vrl.agent.sandbox.guest.cells import Interpreter, serve
from vrl.agent.sandbox.guest.frames import encode_frame
from vrl.agent.sandbox.guest.pictures import Pictures

_OWN = "vrl"


def main() -> None:
    """Serve the tool process until it is gone."""
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=os.dup(0))
    if settings["user"] is not None:
        fence.become(settings["user"])
    _warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 4096, 2)
        if not message:
            break
        if os.fork() == 0:
            control.close()
            _begin_session(settings, message.decode(), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
    if settings["folder"] is not None:
        shutil.rmtree(settings["folder"], ignore_errors=True)


def _warm_up() -> None:
    """Do once what each first figure and image would do: find fonts, load file formats, make tables."""
    matplotlib.use("Agg")
    PIL.Image.init()
    figure, axes = pyplot.subplots()
    axes.plot(numpy.linalg.inv(numpy.eye(2)), label="a")
    axes.legend()
    figure.savefig(io.BytesIO(), format="png")
    pyplot.close(figure)
    site.setquit()
    site.sethelper()


def _begin_session(settings: dict[str, Any], folder: str, channel_descriptor: int, output: int) -> None:
    """Close the inner fence, say so, and serve. Never returns."""
    channel = socket.socket(fileno=channel_descriptor)
    try:
        _close_in(settings, folder)
    except OSError as error:
        channel.sendall(encode_frame({"failure": str(error)}))
        os._exit(1)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, descriptor in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, descriptor)
    os.close(null)
    os.close(output)
    pictures = Pictures(settings["images"], settings["image_pixels"])
    interpreter = Interpreter(pictures, settings["output_chars"], alone=settings["namespaces"])
    _forget_ourselves()
    with contextlib.suppress(OSError):
        channel.sendall(encode_frame({"failure": None}))
        serve(channel, interpreter, pictures)
    os._exit(0)


def _close_in(settings: dict[str, Any], folder: str) -> None:
    if settings["namespaces"]:
        fence.separate()
        if os.fork() != 0:
            os._exit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.umask(0o077)
    processes = settings["processes"] if settings["namespaces"] else None
    fence.limit(settings["memory_mib"], settings["file_mib"], settings["cpu_seconds"], processes)
    if settings["namespaces"]:
        fence.hide_files(settings["file_mib"])
    else:
        fence.die_with_parent()
    os.environ["HOME"] = os.environ["TMPDIR"] = folder
    os.chdir(folder)
    fence.drop_privileges()
    fence.filter_system_calls(allow_processes=settings["namespaces"])


def _forget_ourselves() -> None:
    """Take our own modules out of the reach of a plain import."""
    for name in [name for name in sys.modules if name == _OWN or name.startswith(f"{_OWN}.")]:
        del sys.modules[name]
    program = os.environ.pop("SANDBOX_PROGRAM", None)
    if program is not None:
        sys.path[:] = [entry for entry in sys.path if not entry.startswith(program)]
        os.environ["PYTHONPATH"] = "/packages"
    sys.argv[:] = [""]


if __name__ == "__main__":
    main()
