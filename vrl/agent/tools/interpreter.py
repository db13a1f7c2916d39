"""A Python interpreter as a tool: one session an episode, started with its first cell."""

from collections.abc import Mapping
from typing import Any, Final, final

from vrl.agent.sandbox.types import CellResult, CodeRunner, CodeSession
from vrl.agent.tools.types import ToolAnswer, ToolResources, check_settings, failed, function_schema
from vrl.protocol.errors import ConfigError
from vrl.protocol.trajectory import Prompt

SCHEMA: Final = function_schema(
    "python",
    "Run Python code in an interpreter that keeps its variables. Printed text, the value of a last expression and "
    "shown images come back. The images of the question are the variables image_1, image_2, ...",
    {"code": {"type": "string", "description": "The code to run."}},
    "code",
)


@final
class InterpreterSession:
    """The interpreter of one episode. Errors of the code are answers; only a missing sandbox raises (SandboxError)."""

    def __init__(self, runner: CodeRunner, prompt: Prompt) -> None:
        self._runner = runner
        self._prompt = prompt
        self._session: CodeSession | None = None

    def call(self, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Run `arguments["code"]`."""
        code = arguments.get("code")
        if not isinstance(code, str) or not code.strip():
            return failed("there is no code to run")
        return self.run(code)

    def run(self, code: str) -> ToolAnswer:
        """Run a cell."""
        if self._session is None:
            self._session = self._runner.session(self._prompt.images)
        result = self._session.run(code)
        return ToolAnswer(
            text=_text(result),
            images=result.images,
            failed=result.error is not None,
            info={"code_seconds": result.seconds},
        )

    def finish(self) -> float:
        """Return 0: running code is no merit."""
        return 0.0

    def close(self) -> None:
        """End the interpreter."""
        if self._session is not None:
            self._session.close()
            self._session = None


@final
class InterpreterTool:
    """The tool `python`."""

    schema = SCHEMA

    def __init__(self, runner: CodeRunner) -> None:
        self._runner = runner

    def start(self, prompt: Prompt, options: Mapping[str, Any]) -> InterpreterSession:  # noqa: ARG002 - nothing to set
        """Return the interpreter of one episode."""
        return InterpreterSession(self._runner, prompt)

    def close(self) -> None:
        """Leave the runner to its owner."""


def interpreter_tool(config: Mapping[str, Any], resources: ToolResources) -> InterpreterTool:
    """Return the tool `python`, which has no settings. Raises ConfigError where nothing can run code."""
    check_settings(config, (), "the tool python")
    return InterpreterTool(runner_of(resources, "the tool python"))


def runner_of(resources: ToolResources, who: str) -> CodeRunner:
    """Return what runs code. Raises ConfigError that names who asked where there is nothing."""
    if resources.code_runner is None:
        raise ConfigError(f"{who} needs a code sandbox, and this run has none")
    return resources.code_runner


def _text(result: CellResult) -> str:
    parts = [part for part in (result.output.rstrip("\n"), result.error) if part]
    if result.lost:
        parts.append("The interpreter was restarted; its variables are gone.")
    if not parts and not result.images:
        parts.append("The code ran and printed nothing.")
    return "\n".join(parts)
