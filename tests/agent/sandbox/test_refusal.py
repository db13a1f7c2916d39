"""Where no sandbox can be had the message says why and what to do; limits alone are for those who ask for them."""

import logging
import os
import socket
from pathlib import Path

import pytest

from vrl.agent.sandbox.fusion import FusionRunner
from vrl.agent.sandbox.local import LocalRunner
from vrl.agent.sandbox.runner import make_runner, probe
from vrl.protocol.config.sandbox import SandboxConfig
from vrl.protocol.errors import SandboxError

_LIMITS = SandboxConfig(kind="rlimits", cell_seconds=1.0, memory_mib=256, file_mib=16, pool_size=1)


def test_without_bubblewrap_it_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    message = probe(SandboxConfig())
    assert message is not None
    assert "apt-get install bubblewrap" in message
    assert "sandbox.kind=rlimits" in message
    with LocalRunner(SandboxConfig()) as runner:
        session = runner.session()
        for _ in range(2):  # nothing hangs, and a later try is a new one
            with pytest.raises(SandboxError, match="needs the program bwrap"):
                session.run("1")


def test_without_namespaces_it_refuses_and_says_what_was_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    message = probe(SandboxConfig())
    assert message is not None
    assert "No permissions to create new namespace" in message
    assert "unprivileged_userns_clone" in message


def test_the_probe_says_yes_where_it_works(bubblewrap: None):
    assert probe(SandboxConfig(pool_size=1)) is None


def test_a_remote_sandbox_without_a_server_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    runner = FusionRunner(SandboxConfig(kind="remote", url=f"http://127.0.0.1:{port}"), first_pause_seconds=0.01)
    with pytest.raises(SandboxError, match=f"127.0.0.1:{port}/run_jupyter gives no answer: URLError"):
        runner.session().run("1")
    with pytest.raises(SandboxError, match=r"sandbox\.url"):
        make_runner(SandboxConfig(kind="remote"))


def test_limits_alone_warn_and_still_hold(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VRL_TEST_SECRET", "hunter2")
    with caplog.at_level(logging.WARNING), LocalRunner(_LIMITS) as runner:
        assert "WITHOUT A SANDBOX" in caplog.text
        session = runner.session()
        assert session.run("x = 6\nx * 7").output == "42\n"
        folder = session.run("import os\nprint(os.getcwd())\nopen('left', 'w').close()").output.strip()
        assert "hunter2" not in session.run("str(os.environ)").output
        assert "not permitted" in (session.run("os.fork()").error or "")
        assert "not permitted" in (session.run("import socket\nsocket.socket()").error or "")
        assert "MemoryError" in (session.run("bytearray(1 << 30)").error or "")
        assert "interrupted" in (session.run("while True: pass").error or "")
        assert session.run("x").output == "6\n"
        session.close()
        assert os.path.isabs(folder)
        assert not Path(folder).exists()
