"""One asyncio loop in a thread of its own, for asynchronous tools and MCP clients called from plain threads."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar, final

_T = TypeVar("_T")
_END_SECONDS: Final = 20.0


@final
class EventLoopThread:
    """Runs coroutines for other threads. The thread starts with the first and is a daemon."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Begin to run a coroutine, after those submitted before it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Return what the coroutine returns."""
        return self.submit(coroutine).result()

    def close(self) -> None:
        """Cancel what runs and end the thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(_END_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_END_SECONDS)
        loop.close()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
            return self._loop


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
