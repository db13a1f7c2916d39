"""An environment of function tools: the model calls tools by name until it answers (`tools`, `image_tools`)."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, final

from vrl.agent.environments.observations import ObservationBuilder, TextLimit
from vrl.agent.environments.types import StepResult
from vrl.agent.parsers.answer import last_answer
from vrl.agent.parsers.hermes import parse_tool_calls
from vrl.agent.parsers.types import Action, ParseError, ToolCall
from vrl.agent.tools.schemas import ArgumentChecker
from vrl.agent.tools.types import Answering, ImageLimits, Tool, ToolAnswer, ToolSession, failed
from vrl.protocol.trajectory import Prompt

_MAX_NAME_CHARACTERS: Final = 60


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """What bounds one turn of tool calls."""

    max_parallel_calls: int = 1  # calls that run; the others are told so
    text: TextLimit = field(default_factory=TextLimit)
    images: ImageLimits = field(default_factory=ImageLimits)


@final
class ToolKind:
    """Episodes with a set of tools. A turn that calls none, or that answers in `<answer>`, ends the episode."""

    def __init__(
        self, tools: Sequence[Tool], limits: TurnLimits, role: str = "tool", show_schemas: bool = True
    ) -> None:
        """Take tools with different names. `role` is that of the messages that carry their answers.

        Without `show_schemas` the template shows the model no tools: the data's own prompts tell of them.
        """
        self.tools = {tool.schema["function"]["name"]: tool for tool in tools}
        self.checkers = {name: ArgumentChecker(tool.schema) for name, tool in self.tools.items()}
        self.limits = limits
        self.role = role
        self._show_schemas = show_schemas

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """Schemas of the tools, for the chat template."""
        return [tool.schema for tool in self.tools.values()] if self._show_schemas else []

    def start(self, prompt: Prompt) -> "ToolEnvironment":
        """Return the environment of one episode."""
        return ToolEnvironment(self, prompt)

    def close(self) -> None:
        """Close the tools."""
        with ExitStack() as stack:
            for tool in self.tools.values():
                stack.callback(tool.close)


@final
class ToolEnvironment:
    """One episode. Sessions of tools start with their first call."""

    def __init__(self, kind: ToolKind, prompt: Prompt) -> None:
        self._kind = kind
        self._prompt = prompt
        self._sessions: dict[str, ToolSession] = {}

    def step(self, text: str) -> StepResult:
        """Carry out the calls of a turn; without one, or with an answer, end the episode.

        `info` counts `tool_calls` (made), `tool_errors` (of them or for an unknown tool or bad arguments) and
        `malformed_calls` (that could not be read); where tools raised, also `tool_exceptions` and their
        `tool_tracebacks`.
        """
        turn = parse_tool_calls(text)
        if not turn.actions or last_answer(turn.content) is not None:
            return StepResult(reward=self.finish())
        names, answers = self._answers(turn.actions)
        observation = ObservationBuilder(self._kind.role, self._kind.limits.text, self._kind.limits.images)
        for name, answer in zip(names, answers, strict=True):
            observation.add(answer, **({"name": name} if name and self._kind.role == "tool" else {}))
        malformed = sum(isinstance(action, ParseError) for action in turn.actions)
        info: dict[str, Any] = {key: value for answer in answers for key, value in answer.info.items()}
        info |= {
            "tool_calls": len(answers) - malformed,
            "tool_errors": sum(answer.failed for answer in answers) - malformed,
            "malformed_calls": malformed,
        }
        tracebacks = [answer.traceback for answer in answers if answer.traceback is not None]
        if tracebacks:
            info |= {"tool_exceptions": len(tracebacks), "tool_tracebacks": tracebacks}
        return StepResult(observation=observation.build(), reward=sum(answer.reward for answer in answers), info=info)

    def finish(self) -> float:
        """Return the reward of the whole episode, by all tools that were called or that the row names, as in verl."""
        for name in self._prompt.tools_kwargs:
            if name in self._kind.tools:
                self._session(name)
        return sum(session.finish() for session in self._sessions.values())

    def close(self) -> None:
        """Close the sessions, all of them whatever one raises."""
        with ExitStack() as stack:
            for session in self._sessions.values():
                stack.callback(session.close)
            self._sessions = {}

    def _answers(self, actions: Sequence[Action]) -> tuple[list[str | None], list[ToolAnswer]]:
        """Return the tools' names and answers in the order of the actions. Calls begin in that order too."""
        allowed = self._kind.limits.max_parallel_calls
        begun: list[Answering] = []
        for action in actions:
            refusal = self._refusal(action, allowed)
            if refusal is None and isinstance(action, ToolCall):
                allowed -= 1
                begun.append(self._session(action.name).call(action.arguments))
            else:
                begun.append(refusal or failed("this is no tool call"))
        wait(item for item in begun if isinstance(item, Future))
        answers = [item.result() if isinstance(item, Future) else item for item in begun]
        return [action.name if isinstance(action, ToolCall) else None for action in actions], answers

    def _refusal(self, action: Action, allowed: int) -> ToolAnswer | None:
        if isinstance(action, ParseError):
            return failed(action.message)
        if not isinstance(action, ToolCall):
            return None
        if action.name not in self._kind.tools:
            known = ", ".join(self._kind.tools)
            return failed(f"there is no tool {action.name[:_MAX_NAME_CHARACTERS]!r}; the tools are: {known}")
        if allowed < 1:
            return failed(f"not run: at most {self._kind.limits.max_parallel_calls} calls run in a turn")
        problem = self._kind.checkers[action.name].problem(action.arguments)
        return None if problem is None else failed(problem)

    def _session(self, name: str) -> ToolSession:
        if name not in self._sessions:
            tool = self._kind.tools[name]
            self._sessions[name] = tool.start(self._prompt, self._prompt.tools_kwargs.get(name) or {})
        return self._sessions[name]
