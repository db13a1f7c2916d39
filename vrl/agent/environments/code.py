"""An environment of code: the model writes Python cells and reads what they print and show (`code_interpreter`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

from vrl.agent.environments.observations import ObservationBuilder
from vrl.agent.environments.tool_calls import TurnLimits, not_run
from vrl.agent.environments.types import StepResult
from vrl.agent.parsers.answer import last_answer
from vrl.agent.parsers.code import parse_code_tags, parse_fenced_code
from vrl.agent.parsers.types import Action, CodeCell, ParsedTurn, ParseError
from vrl.agent.sandbox.types import CodeRunner
from vrl.agent.tools.interpreter import InterpreterSession
from vrl.agent.tools.types import failed
from vrl.protocol.trajectory import Prompt

CODE_PARSERS: Final[Mapping[str, Callable[[str], ParsedTurn]]] = {
    "python": parse_fenced_code,  # ```python fences
    "code_tag": parse_code_tags,  # <code> tags
}


@final
class CodeKind:
    """Episodes with an interpreter each. A turn without code, or that answers in `<answer>`, ends the episode."""

    schemas: Sequence[Mapping[str, Any]] = ()

    def __init__(self, runner: CodeRunner, parse: Callable[[str], ParsedTurn], limits: TurnLimits, role: str) -> None:
        self.runner = runner
        self.parse = parse
        self.limits = limits
        self.role = role

    def start(self, prompt: Prompt) -> "CodeEnvironment":
        """Return the environment of one episode."""
        return CodeEnvironment(self, prompt)

    def close(self) -> None:
        """Leave the runner to its owner."""


@final
class CodeEnvironment:
    """One episode and its interpreter."""

    def __init__(self, kind: CodeKind, prompt: Prompt) -> None:
        self._kind = kind
        self._session = InterpreterSession(kind.runner, prompt)

    def step(self, text: str, cut: bool = False) -> StepResult:
        """Run the cells of a turn one after the other, up to `max_parallel_calls` of them.

        `info` counts `tool_calls` (cells), `tool_errors` (cells that failed, and one for all above the limit) and
        `malformed_calls` (a last one that was `cut` off is none).
        """
        turn = self._kind.parse(text)
        if not turn.actions or last_answer(turn.content) is not None:
            return StepResult()
        observation = ObservationBuilder(self._kind.role, self._kind.limits.text, self._kind.limits.images)
        most, seconds = self._kind.limits.max_parallel_calls, 0.0
        cells = errors = faults = 0
        left: list[Action] = []
        for action in turn.actions:
            if isinstance(action, CodeCell) and cells < most:
                answer = self._session.run(action.code)
                cells += 1
                errors += answer.failed
                seconds += float(answer.info["code_seconds"])
                observation.add(answer)
            elif isinstance(action, ParseError) and not action.is_surplus and faults < most:
                faults += 1
                observation.add(failed(action.message))
            else:
                left.append(action)
        if left:
            observation.add(not_run(left, most, "code block"))
        counts = {
            "tool_calls": cells,
            "tool_errors": errors + bool(left),
            "malformed_calls": turn.count_malformed(cut),
            "code_seconds": seconds,
        }
        return StepResult(observation=observation.build(), info=counts)

    def close(self) -> None:
        """End the interpreter."""
        self._session.close()
