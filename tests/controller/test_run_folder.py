"""The run folder: what lies in it, its log, and that two runs do not share one. Torch-free."""

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from vrl.controller.run_folder import RunFolder
from vrl.protocol.errors import ConfigError

OPEN_IT = "import sys; from pathlib import Path; from vrl.controller.run_folder import RunFolder; "
OPEN_IT += "folder = RunFolder.open(Path(sys.argv[1]), ''); print('open', flush=True); input()"


def test_a_new_folder_holds_config_and_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with RunFolder.open(Path("outputs/tiny/run"), "a: 1\n") as folder:
        assert folder.path == tmp_path / "outputs" / "tiny" / "run"
        assert folder.config.read_text() == "a: 1\n"
        assert (folder.path / "log.txt").exists()
        assert folder.latest_checkpoint() is None
        assert not folder.finished(5)


def test_other_settings_set_the_old_ones_aside(tmp_path: Path):
    for text in ("a: 1\n", "a: 1\n", "a: 2\n"):
        RunFolder.open(tmp_path, text).close()
    assert (tmp_path / "config.yaml").read_text() == "a: 2\n"
    assert (tmp_path / "config.1.yaml").read_text() == "a: 1\n"
    assert not (tmp_path / "config.2.yaml").exists()


def test_finished_means_the_checkpoint_of_the_last_step(tmp_path: Path):
    with RunFolder.open(tmp_path, "") as folder:
        with folder.new_checkpoint(5, None) as part:
            (part / "driver.json").write_text("{}")
        assert folder.latest_checkpoint() == tmp_path / "checkpoints" / "global_step_5"
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5\n"
        assert folder.finished(5)
        assert not folder.finished(6)
        assert not folder.finished(None)


def test_opening_clears_up_after_a_kill_and_says_so(tmp_path: Path):
    (tmp_path / "checkpoints" / "global_step_5.tmp").mkdir(parents=True)
    RunFolder.open(tmp_path, "").close()
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert "global_step_5.tmp" in (tmp_path / "log.txt").read_text()


def test_the_log_file_takes_all_and_the_console_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with RunFolder.open(tmp_path, ""):
        logging.getLogger("vrl.controller.something").info("a step")
        logging.getLogger("vrl.controller.something").warning("look here")
        logging.getLogger("noisy").info("chatter")
        warnings.warn("old call", stacklevel=1)
    logging.getLogger("vrl.controller.something").warning("too late")
    text, console = (tmp_path / "log.txt").read_text(), capsys.readouterr()
    assert [word for word in ("a step", "look here", "old call", "chatter", "too late") if word in text] == [
        "a step",
        "look here",
        "old call",
    ]
    assert console.out == ""
    assert "WARNING: look here\n" in console.err
    assert "a step" not in console.err


def test_a_second_process_cannot_open_it(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", OPEN_IT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match=r"another run has .* open.*experiment_name"):
            RunFolder.open(tmp_path, "")
        other.communicate("\n")
    RunFolder.open(tmp_path, "").close()


def test_a_path_that_is_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="default_local_dir"):
        RunFolder.open(tmp_path / "file" / "run", "")
