"""A whole program with its standard input, run in a session: descriptor 0 is a file, as a shell's `<` gives one."""

import base64
from typing import Final

from vrl.agent.sandbox.types import CellResult, CodeRunner, CodeSession

_PIECE_BYTES: Final = 90_000  # a cell may have 200,000 characters
_FEED: Final = """\
import base64 as _base64, tempfile as _tempfile
if {number} == 0:
    _input = _tempfile.TemporaryFile()
_written = _input.write(_base64.b64decode({piece!r}))
"""
# Gives back what it changes. os._exit would end the interpreter together with what says how the program ended.
_PROGRAM: Final = """\
import os as _os, sys as _sys
def _leave(status):
    raise SystemExit(status)
_input.seek(0)
_kept, _standard_input = (_sys.stdin, _sys.stderr, _os._exit), _os.dup(0)
_os.dup2(_input.fileno(), 0)
_sys.stdin, _sys.stderr = open(0, encoding="utf-8", closefd=False), open(_os.devnull, "w")
_os._exit = _leave
try:
    exec(compile({code!r}, "solution.py", "exec"), {{"__name__": "__main__"}})
except SystemExit as _end:
    if _end.code not in (None, 0):
        raise
finally:
    _sys.stdin, _sys.stderr, _os._exit = _kept
    _os.dup2(_standard_input, 0)
    _os.close(_standard_input)
    _sys.stdout.flush()
_done = True
"""


def run_alone(runner: CodeRunner, code: str, standard_input: str) -> CellResult:
    """Run a Python program in a session of its own, and return what it printed.

    `error` is set when it ends with an exception, another exit status than 0, or at a limit.
    """
    session = runner.session()
    try:
        return _run(session, code, standard_input)
    finally:
        session.close()


def _run(session: CodeSession, code: str, standard_input: str) -> CellResult:
    data = standard_input.encode(errors="surrogatepass")
    for number, start in enumerate(range(0, max(len(data), 1), _PIECE_BYTES)):
        piece = base64.b64encode(data[start : start + _PIECE_BYTES]).decode()
        fed = session.run(_FEED.format(number=number, piece=piece))
        if fed.error is not None:
            return fed
    return session.run(_PROGRAM.format(code=code))
