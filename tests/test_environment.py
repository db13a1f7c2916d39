"""docker/environment.sh and train_ppo.sh: what they say when something is missing, what they repair, how fast they are.

Each test runs the real scripts in a folder of its own. PATH holds only what the test puts there, so that a command can
be missing. Python makes a virtual environment that holds nothing; uv writes down how it was called and makes `vrl`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = (
    "awk bash cat chmod cp cut df dirname du find flock grep mkdir mv rm sed sha256sum sh sleep tail tee touch uname"
)
COMPILER = "as cc gcc g++ ld"
PYTHON = f"""#!/bin/sh
case "$1 $2" in
    "-m venv")
        mkdir -p "$3/bin"
        cp "$0" "$3/bin/python"
        echo "VIRTUAL_ENV=$3" > "$3/bin/activate" ;;
    "-m pip") exit 1 ;;
    *) exec "{sys.executable}" "$@" ;;
esac
"""
UV = """#!/bin/sh
[ "$1" = --version ] && exit
echo "$2 begins" >> "$UV_CALLS"
[ -z "$UV_WAITS" ] || sleep "$UV_WAITS"
if [ -n "$UV_FAILS" ]; then echo "error: $UV_FAILS" >&2; exit 2; fi
case "$*" in
    *--editable*) printf '#!/bin/sh\\necho "$PWD: $*"\\n' > .venv/bin/vrl; chmod +x .venv/bin/vrl ;;
esac
echo "$2 ends" >> "$UV_CALLS"
"""


@dataclass
class Sandbox:
    """A folder with the scripts, and a PATH of its own."""

    root: Path
    commands: Path
    settings: dict[str, str] = field(default_factory=dict)

    def link(self, *names: str) -> None:
        for name in names:
            found = shutil.which(name, path="/usr/bin:/bin:/usr/local/bin")
            if found:
                (self.commands / name).symlink_to(found)

    def script(self, name: str, text: str) -> None:
        (self.commands / name).unlink(missing_ok=True)
        (self.commands / name).write_text(text)
        (self.commands / name).chmod(0o755)

    def start(self, *command: str, **settings: str) -> "subprocess.Popen[str]":
        environment = {"PATH": str(self.commands), "HOME": str(self.root), "VRL_DEVICE": "cpu"}
        return subprocess.Popen(
            [str(self.commands / "bash"), *command],
            env=environment | self.settings | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.root.parent,
            start_new_session=True,
        )

    def run(self, *command: str, **settings: str) -> tuple[int, str, str]:
        process = self.start(*(command or (self.environment,)), **settings)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    @property
    def environment(self) -> str:
        return str(self.root / "docker" / "environment.sh")

    @property
    def calls(self) -> list[str]:
        path = self.root / "uv_calls"
        return path.read_text().splitlines() if path.exists() else []


INSTALL = ["sync begins", "sync ends", "install begins", "install ends"]


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    root = tmp_path / "a clone"
    (root / "docker").mkdir(parents=True)
    for name in ("docker/environment.sh", "docker/cpu.lock", "docker/gpu.lock", "setup.py", "train_ppo.sh"):
        shutil.copy(ROOT / name, root / name)
    commands = tmp_path / "bin"
    commands.mkdir()
    box = Sandbox(root, commands, {"UV_CALLS": str(root / "uv_calls")})
    box.link(*TOOLS.split(), *COMPILER.split())
    box.script("python3.11", PYTHON)
    box.script("uv", UV)
    return box


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_an_old_python_is_named(sandbox: Sandbox):
    old = '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 || echo 9\n'
    (sandbox.commands / "python3.11").unlink()
    sandbox.script("python3", old)
    code, _, err = sandbox.run()
    assert code != 0
    assert "needs Python 3.11" in last_line(err)
    assert "Python 3.9.2" in last_line(err)
    code, _, err = sandbox.run(VRL_PYTHON=str(sandbox.commands / "python3"))
    assert code != 0
    assert "VRL_PYTHON=" in last_line(err)


def test_too_little_disk_is_named(sandbox: Sandbox):
    sandbox.script("df", "#!/bin/sh\necho header\necho /dev/sda 99999999 0 3145728 99% /\n")
    code, _, err = sandbox.run()
    assert code != 0
    assert len(err.splitlines()) == 1
    assert "takes about 10 GiB" in err
    assert "only 3 GiB free" in err
    assert not sandbox.calls


def test_a_missing_compiler_is_named(sandbox: Sandbox):
    for name in COMPILER.split():
        (sandbox.commands / name).unlink(missing_ok=True)
    code, _, err = sandbox.run()
    assert code != 0
    assert len(err.splitlines()) == 1
    assert "no C compiler" in err
    assert "install gcc" in err


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("error sending request for url: dns error", "the package index could not be reached; check the network"),
        ("failed to write: No space left on device (os error 28)", "the disk is full"),
        ("Failed to build `pycosat==0.6.6`", "could not be built from source"),
    ],
)
def test_a_failed_install_says_why_and_is_taken_up_again(sandbox: Sandbox, message: str, said: str):
    code, _, err = sandbox.run(UV_FAILS=message)
    assert code != 0
    assert said in last_line(err)
    assert "same command again" in last_line(err)
    assert not (sandbox.root / ".venv" / ".vrl-complete").exists()


def test_an_install_happens_once_and_train_passes_its_arguments(sandbox: Sandbox):
    assert sandbox.run()[0] == 0
    assert sandbox.calls == INSTALL
    (sandbox.commands / "uv").unlink()  # with the environment in place nothing of this is needed
    (sandbox.commands / "python3.11").unlink()
    begin = time.monotonic()
    code, out, err = sandbox.run(str(sandbox.root / "train_ppo.sh"), "--config-name", "x", "a.b='c d'")
    assert (code, err) == (0, "")
    assert out == f"{sandbox.root.parent}: train --config-name x a.b='c d'\n"
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize("name", ["docker/cpu.lock", "setup.py"])
def test_a_changed_lock_file_is_installed(sandbox: Sandbox, name: str):
    sandbox.run()
    with (sandbox.root / name).open("a") as file:
        file.write("# changed\n")
    assert sandbox.run()[0] == 0
    assert sandbox.calls == INSTALL * 2


def test_the_device_chooses_the_lock_file(sandbox: Sandbox):
    sandbox.run()
    assert "docker/gpu.lock" in sandbox.run(VRL_DEVICE="cuda")[2]
    assert sandbox.calls == INSTALL * 2
    code, _, err = sandbox.run(VRL_DEVICE="tpu")
    assert code != 0
    assert "auto, cpu or cuda" in err


def test_two_at_once_install_once(sandbox: Sandbox):
    processes = [sandbox.start(sandbox.environment, UV_WAITS="0.5") for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert sandbox.calls == INSTALL


@pytest.mark.parametrize("update", [False, True])
def test_an_install_that_was_killed_is_made_anew(sandbox: Sandbox, update: bool):
    if update:
        sandbox.run()
        shutil.copy(sandbox.root / "docker" / "gpu.lock", sandbox.root / "docker" / "cpu.lock")
        (sandbox.root / "uv_calls").unlink()
    process = sandbox.start(sandbox.environment, UV_WAITS="60")
    while not sandbox.calls:
        assert process.poll() is None
        time.sleep(0.02)
    leftover = sandbox.root / ".venv" / "half_a_package"
    leftover.touch()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (sandbox.root / ".venv" / ".vrl-complete").exists()
    code, _, err = sandbox.run()
    assert code == 0, err
    assert not leftover.exists()
    assert (sandbox.root / ".venv" / ".vrl-complete").exists()
    assert sandbox.run()[2] == ""


def test_a_missing_bubblewrap_is_said_and_installed_where_that_is_simple(sandbox: Sandbox):
    _, _, err = sandbox.run()
    assert "bubblewrap is missing" in err
    assert "apt-get install bubblewrap" in err
    asked = sandbox.root / "asked"
    sandbox.script("apt-get", f'#!/bin/sh\necho "$@" >> "{asked}"\n/bin/ln -s /bin/sh "{sandbox.commands}/bwrap"\n')
    (sandbox.root / ".venv" / ".vrl-complete").unlink()
    _, _, err = sandbox.run()
    assert os.geteuid() == 0 or "bubblewrap is missing" in err
    assert os.geteuid() != 0 or asked.read_text() == "install -y bubblewrap\n"
    assert os.geteuid() != 0 or "bubblewrap is missing" not in err
