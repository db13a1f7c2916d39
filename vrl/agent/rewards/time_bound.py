"""A time bound for Python code that works in every thread, where signals reach the main thread only."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar, final

_T = TypeVar("_T")
_raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc


def within(seconds: float, work: Callable[[], _T]) -> _T:
    """Return what `work` returns. Raises TimeoutError when it takes longer.

    It ends at its next step of Python, and not at all while it is in C or when it catches BaseException.
    """
    bound = _Bound(threading.get_ident())
    timer = threading.Timer(seconds, bound.strike)
    timer.daemon = True
    try:
        try:
            timer.start()
            return work()
        finally:
            bound.lift()
            timer.cancel()
    except _TimeOver:
        raise TimeoutError(f"it took longer than {seconds:g} s") from None


@final
class _TimeOver(BaseException):
    """No Exception, which libraries catch on their way."""


@final
class _Bound:
    """Strikes a thread once at most, and never after it was lifted."""

    def __init__(self, thread: int) -> None:
        self._thread = ctypes.c_ulong(thread)
        self._lock = threading.Lock()
        self._lifted = False

    def strike(self) -> None:
        """Raise `_TimeOver` in the thread. Called by another one."""
        with self._lock:
            if not self._lifted:
                _raise_in_thread(self._thread, ctypes.py_object(_TimeOver))

    def lift(self) -> None:
        """End the bound. Called by the thread itself: a strike reaches it in here or never."""
        with self._lock:
            self._lifted = True
            _raise_in_thread(self._thread, None)  # what was set and not yet raised
