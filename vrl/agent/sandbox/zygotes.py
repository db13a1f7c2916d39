"""Starts the sandbox with its zygote in it, and asks that for interpreters.

With bubblewrap, and as root, the zygote starts with the right to change its user, and does so before anything else:
the kernel counts no processes of root. Otherwise all namespaces, the user's included, are new from the start. Either
way each interpreter gets namespaces of its own from the zygote, so that sessions see nothing of one another.
"""

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, final

import vrl
from vrl.agent.sandbox.guest.fence import supports_this_machine
from vrl.agent.sandbox.guest.frames import FrameError, FrameReader
from vrl.agent.sandbox.interpreters import Interpreter
from vrl.agent.sandbox.view import ONE_THREAD, machine_view, zygote_command, zygote_environment
from vrl.protocol.config.sandbox import SandboxConfig
from vrl.protocol.errors import SandboxError

KIND = "actor_rollout_ref.rollout.multi_turn.sandbox.kind"
_WAY_OUT = (
    f"or set {KIND}=remote with a Sandbox Fusion server, or, on a machine without anything to protect, "
    f"{KIND}=rlimits: it keeps limits and refuses the network, but the code can read the files of this user"
)
_NOBODY = 65534
_START_SECONDS = 60.0
_SESSION_SECONDS = 10.0
_CPU_FACTOR = 60  # an interpreter may compute as long as this many cells
_CREDENTIALS = struct.Struct("3i")


@final
class Zygote:
    """One running sandbox. `spawn` is called by one thread; the sandbox dies with the thread that made it."""

    def __init__(self, config: SandboxConfig) -> None:
        """Start it and wait until it is ready. Raises SandboxError with the way out when it cannot be had."""
        self._config = config
        if not supports_this_machine():
            raise SandboxError(f"the code sandbox knows x86-64 and arm64 processors only; set {KIND}=remote")
        if not Path(f"/proc/self/task/{threading.get_native_id()}/children").exists():
            raise SandboxError(f"the code sandbox counts processes in /proc/PID/task/TID/children; set {KIND}=remote")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - read when something goes wrong
        self._popen: subprocess.Popen[bytes] | None = None
        # Of all working folders; the zygote removes it as well, should this process be killed.
        self._folder = tempfile.mkdtemp(prefix="vrl-cells-") if config.kind == "rlimits" else None
        try:
            with theirs:
                self._popen = self._start(theirs.fileno())
            self._await_ready()
        except BaseException:
            self.close()
            raise

    @property
    def process_id(self) -> int:
        """The outermost process, for accounting."""
        assert self._popen is not None, "a zygote that did not start is never handed out"
        return self._popen.pid

    def spawn(self) -> Interpreter:
        """Return a new interpreter. Raises SandboxError when the zygote cannot make one."""
        folder = None if self._folder is None else tempfile.mkdtemp(dir=self._folder)
        ours, theirs = socket.socketpair()
        output, write_end = os.pipe()
        try:
            with theirs:
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
                with contextlib.closing(os.fdopen(write_end, "wb")):
                    socket.send_fds(self._control, [(folder or "/tmp").encode()], [theirs.fileno(), write_end])
            pid = self._await_session(ours)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
            return Interpreter(ours, output, pid, folder, self._config)
        except (OSError, FrameError, SandboxError) as error:
            ours.close()
            os.close(output)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            raise SandboxError(f"the code sandbox makes no interpreter: {error}; {self._complaint()}") from error

    def close(self) -> None:
        """End the sandbox with all interpreters in it."""
        self._control.close()
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()
        self._errors.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, control: int) -> "subprocess.Popen[bytes]":
        if self._config.kind == "rlimits":
            program = Path(__file__).parent / "guest" / "zygote.py"
            command = [sys.executable, "-B", str(program), *zygote_command(self._settings())[-1:]]
            environment = {"PYTHONPATH": str(Path(vrl.__file__).parents[1]), "LANG": "C.UTF-8", **ONE_THREAD}
            environment |= {name: os.environ[name] for name in ("HOME", "MPLCONFIGDIR") if name in os.environ}
        else:
            command, environment = self._bubblewrap(), zygote_environment()
        return subprocess.Popen(
            command, env=environment, stdin=control, stdout=subprocess.DEVNULL, stderr=self._errors, cwd="/",
            start_new_session=True,
        )  # fmt: skip

    def _bubblewrap(self) -> list[str]:
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxError(
                f"the code sandbox needs the program bwrap: install bubblewrap (apt-get install bubblewrap), {_WAY_OUT}"
            )
        command = [program, "--die-with-parent", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"]
        if os.geteuid() == 0:
            command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            command += ["--unshare-all", "--uid", "1000", "--gid", "1000"]
        return [*command, *machine_view().bind_arguments(), "--chdir", "/", *zygote_command(self._settings())]

    def _settings(self) -> dict[str, object]:
        config = self._config
        namespaces = config.kind != "rlimits"
        return {
            "namespaces": namespaces,
            "folder": self._folder,
            "user": _NOBODY if namespaces and os.geteuid() == 0 else None,
            "cpu_seconds": int(_CPU_FACTOR * config.cell_seconds) + 1,
            "memory_mib": config.memory_mib,
            "file_mib": config.file_mib,
            "processes": config.processes,
            "images": config.images,
            "image_pixels": config.image_pixels,
            "output_chars": config.output_chars,
        }

    def _await_ready(self) -> None:
        self._control.settimeout(_START_SECONDS)
        try:
            ready = self._control.recv(16) == b"ready"
        except (TimeoutError, ConnectionResetError):
            ready = False
        if not ready:
            raise SandboxError(
                f"the code sandbox does not start here: {self._complaint()}. It needs bubblewrap that may make "
                "namespaces (sysctl kernel.unprivileged_userns_clone=1, "
                "kernel.apparmor_restrict_unprivileged_userns=0; in Docker --cap-add SYS_ADMIN "
                f"--security-opt seccomp=unconfined), {_WAY_OUT}"
            )

    def _await_session(self, channel: socket.socket) -> int:
        """Wait until the interpreter says that its fence is closed; return its process id on this machine."""
        reader = FrameReader(4096, 0)
        deadline = time.monotonic() + _SESSION_SECONDS
        pid = 0
        while True:
            channel.settimeout(max(0.01, deadline - time.monotonic()))
            data, ancillary, _, _ = channel.recvmsg(reader.wanted, socket.CMSG_SPACE(_CREDENTIALS.size))
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    pid = _CREDENTIALS.unpack(content)[0]
            if not data:
                raise SandboxError("a new interpreter ended before it was ready")
            frame = reader.feed(data)
            if frame is not None:
                break
        if frame[0].get("failure") is not None or pid <= 0:
            raise SandboxError(f"{frame[0].get('failure')} is refused by this machine, {_WAY_OUT}")
        return pid

    def _complaint(self) -> str:
        self._errors.seek(0)
        text = self._errors.read(1 << 16).decode(errors="replace").strip()
        exit_code = None if self._popen is None else self._popen.poll()
        return text.splitlines()[-1] if text else f"exit code {exit_code}"
