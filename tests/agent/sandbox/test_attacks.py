"""What programs try comes to nothing: an error or a harmless answer, and the next cell and session are as ever."""

import contextlib
import dataclasses
import os
import re
import socket
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.sandbox.attacks import ATTACKS, ENDLESS, Attack
from tests.agent.sandbox.conftest import SHORT
from vrl.agent.sandbox.local import LocalRunner
from vrl.agent.sandbox.usage import usage_of

HASTY = dataclasses.replace(SHORT, cell_seconds=0.4, pool_size=1)
_NAMES = [attack.name for attack in ATTACKS]


@pytest.fixture(scope="module")
def runners(runner: LocalRunner) -> Iterator[dict[float, LocalRunner]]:
    with LocalRunner(HASTY) as hasty:
        yield {SHORT.cell_seconds: runner, HASTY.cell_seconds: hasty}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory, listener: socket.socket) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("host")
    (folder / "secret").write_text("hunter2")
    os.environ["VRL_TEST_SECRET"] = "hunter2"
    return {
        "PORT": str(listener.getsockname()[1]),
        "SECRET": str(folder / "secret"),
        "PARENT": str(os.getpid()),
        "TRACE": str(folder / "trace"),
    }


def test_the_list_is_long_enough_and_names_are_distinct():
    assert len(set(_NAMES)) == len(ATTACKS) >= 40


@pytest.mark.parametrize("attack", ATTACKS, ids=_NAMES)
def test_an_attack_comes_to_nothing(
    attack: Attack, runners: dict[float, LocalRunner], targets: dict[str, str], listener: socket.socket
):
    runner = runners[HASTY.cell_seconds if attack in ENDLESS else SHORT.cell_seconds]
    with contextlib.closing(runner.session()) as session:
        result = session.run(string.Template(attack.code).safe_substitute(targets))
        assert result.seconds < SHORT.cell_seconds + 4
        assert session.run("6 * 7").output == "42\n"
    said = f"{result.error or ''}\n{result.output}".strip()
    if not (attack.slow and "TimeoutError" in said):
        assert re.search(attack.wanted, said, re.MULTILINE | re.DOTALL), said
        assert result.lost == attack.lost
    assert "hunter2" not in said
    assert len(result.images) <= SHORT.images
    assert not Path(targets["TRACE"]).exists()
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_an_answer_that_a_cell_forged_is_noticed_at_the_next_cell(runner: LocalRunner):
    """It may lie about itself, which printing does as well; it may not get ahead of the cells after it."""
    channel = next(attack.code for attack in ATTACKS if attack.name == "no JSON").rpartition("\n")[0]
    session = runner.session()
    session.run("1")
    session.run(f"{channel}\nchannel.sendall(frame({{'id': 2, 'error': None, 'sizes': [], 'blobs': []}}))\n1 / 0")
    assert session.run("6 * 7").lost
    assert session.run("6 * 7").output == "42\n"
    session.close()


def test_threads_left_behind_sleep_between_cells(runner: LocalRunner):
    session = runner.session()
    session.run(
        "import threading, time\ndef spin():\n    while True: pass\nthreading.Thread(target=spin, daemon=True).start()"
    )
    (pid,) = session.process_ids()

    def ticks() -> int:
        return sum(map(int, Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[11:13]))

    time.sleep(0.05)
    before = ticks()
    time.sleep(0.3)
    assert ticks() == before
    assert session.run("threading.active_count()").output == "2\n"
    session.close()


@pytest.mark.parametrize("kind", ["local", "rlimits"])
def test_a_tool_process_that_is_killed_takes_its_sandbox_along(bubblewrap: None, kind: str):
    program = (
        "import sys, threading\n"
        "from vrl.agent.sandbox.local import LocalRunner\n"
        "from vrl.protocol.config.sandbox import SandboxConfig\n"
        "session = (runner := LocalRunner(SandboxConfig(kind=sys.argv[1], pool_size=1))).session()\n"
        "session.run('1')\n"
        "folder = session.run('import os; print(os.getcwd())').output.strip()\n"
        "sys.stdout.write(f'{runner.process_ids()[0]} {session.process_ids()[0]} {folder}\\n')\n"
        "sys.stdout.flush()\n"
        "session.run('while True: pass')\n"
    )
    command = [sys.executable, "-c", program, kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        *pids, folder = process.stdout.readline().split()
        assert len(pids) == 2
        assert folder.startswith("/")
        time.sleep(0.1)
        process.kill()
    deadline = time.monotonic() + 5
    while any(Path("/proc", pid).exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(Path("/proc", pid).exists() for pid in pids)
    assert kind == "local" or not Path(folder).exists()


def test_many_bad_cells_leave_no_process_and_no_growth(runner: LocalRunner):
    """A third of the cells endless, forking, hungry or flooding; the benchmark runs a thousand of them."""
    bad = ["import os\nos._exit(1)", "import os\nwhile True: os.fork()", "a = 'x' * (1 << 33)", "import os\nos.abort()"]
    sessions = [runner.session() for _ in range(3)]
    session_processes = runner.process_ids
    for session in sessions:
        session.run("1")
    for number in range(45):
        session = sessions[number % 3]
        result = session.run(bad[number // 3 % 4] if number % 3 == 0 else "sum(range(1000))")
        assert (result.error is None) == (number % 3 != 0)
    for session in sessions:
        session.close()
    deadline = time.monotonic() + 10
    (outermost,) = session_processes()
    ready = 2 + SHORT.pool_size + 1  # bubblewrap twice, the zygote, interpreters that wait
    while (usage := usage_of(outermost, 1000)).processes != ready and time.monotonic() < deadline:
        time.sleep(0.05)
    assert usage.processes == ready
    assert len(list(Path("/proc/self/fd").iterdir())) < 64
