"""Environments for tests, loaded by name in tool processes. What a turn's text says is what happens."""

import asyncio
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vrl.agent.environments.types import Observation, StepResult
from vrl.protocol.errors import ConfigError
from vrl.protocol.trajectory import Prompt

SCHEMA = {"type": "function", "function": {"name": "act", "description": "acts", "parameters": {"type": "object"}}}


class Scripted:
    """Follows `tools_kwargs["script"]`, an entry a turn: what to do, as a mapping."""

    def __init__(self, prompt: Prompt, folder: Path | None) -> None:
        self._prompt = prompt
        self._folder = folder
        self._turn = 0
        self._note("start")

    def step(self, text: str, cut: bool = False) -> StepResult:
        script = self._prompt.tools_kwargs["script"]
        act = script[min(self._turn, len(script) - 1)]
        self._turn += 1
        self._note(f"step {text!r}")
        time.sleep(act.get("sleep", 0.0))
        if act.get("hold"):
            re.match("(a+)+$", "a" * 64 + "b")  # never lets go of the interpreter's lock
        if act.get("die") or (act.get("die_once") and self._first("died")):
            os._exit(7)
        if act.get("cancel"):
            raise asyncio.CancelledError
        if act.get("raise") or (act.get("raise_once") and self._first("raised")):
            raise RuntimeError(f"the tool broke in turn {self._turn}")
        if "return" in act:
            return act["return"]
        observation = None
        if "say" in act:
            messages = act["say"] if isinstance(act["say"], list) else [{"role": "tool", "content": act["say"]}]
            observation = Observation(messages=tuple(messages), images=tuple(act.get("images", ())))
        return StepResult(
            observation=observation,
            reward=act.get("reward", 0.0),
            done=act.get("done", False),
            info={"calls": 1, "thread": threading.current_thread().name, "told_cut": cut, **act.get("info", {})},
        )

    def finish(self) -> float:
        return self._prompt.tools_kwargs.get("finish", 0.0)

    def close(self) -> None:
        self._note("close")

    def _note(self, what: str) -> None:
        if self._folder is not None:
            with (self._folder / f"{self._prompt.uid}.txt").open("a") as file:
                file.write(f"{os.getpid()} {what}\n")

    def _first(self, what: str) -> bool:
        assert self._folder is not None
        try:
            (self._folder / f"{self._prompt.uid}.{what}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Kind:
    def __init__(self, folder: str | None = None, broken_start: bool = False) -> None:
        self._folder = None if folder is None else Path(folder)
        self._broken_start = broken_start

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return [SCHEMA]

    def start(self, prompt: Prompt) -> Scripted:
        if self._broken_start:
            raise OSError("no server there")
        return Scripted(prompt, self._folder)

    def close(self) -> None:
        if self._folder is not None:
            (self._folder / f"kind_closed_{os.getpid()}").touch()


def refuses(**_: Any) -> Kind:
    raise ConfigError("url is wanted")


def dies(**_: Any) -> Kind:
    os._exit(3)
