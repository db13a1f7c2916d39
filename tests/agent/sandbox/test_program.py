"""Whole programs read a real standard input, and leave as they like."""

import pytest

from vrl.agent.sandbox.local import LocalRunner


@pytest.mark.parametrize(
    "code",
    [
        "print(input() + input())",
        "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read().replace(b'\\n', b''))",
        "print(open(0).read().replace('\\n', ''))",
        "import os\nos.write(1, os.read(0, os.fstat(0).st_size).replace(b'\\n', b''))",
        "import os\nprint(input() + input())\nos._exit(0)",
        "import threading\nt = threading.Thread(target=lambda: print(input() + input()))\nt.start()\nt.join()",
        "print(input() + input())\nexit()",
    ],
)
def test_a_program_reads_as_it_likes(runner: LocalRunner, code: str):
    result = runner.run_program(code, "año\nb\n")
    assert result.error is None
    assert result.output.rstrip("\n") == "añob"


def test_a_program_that_fails_or_goes_on_says_so(runner: LocalRunner):
    assert (runner.run_program("print(1)\n1 / 0").error or "").endswith("ZeroDivisionError: division by zero")
    assert (runner.run_program("import os\nos._exit(3)").error or "").endswith("SystemExit: 3")
    assert "TimeoutError" in (runner.run_program("while True: pass").error or "")


def test_a_long_input_arrives_whole(runner: LocalRunner):
    assert runner.run_program("print(sum(map(int, open(0))))", "7\n" * 300_000).output == "2100000\n"
