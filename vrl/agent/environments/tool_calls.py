"""An environment of function tools: the model calls tools by name until it answers (`tools`, `image_tools`)."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
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

    max_parallel_calls: int = 1  # calls that run, and mistakes told one by one; a note stands for all others
    text: TextLimit = field(default_factory=TextLimit)
    images: ImageLimits = field(default_factory=ImageLimits)


def not_run(left: Sequence[Action], most: int, unit: str) -> ToolAnswer:
    """Return the one answer to all actions above the limit of a turn. There must be one."""
    unread = [action.message for action in left if isinstance(action, ParseError) and action.is_surplus]
    count = len(left) - len(unread)
    if not count:
        return failed(unread[0])
    several = count > 1 or bool(unread)
    number = f"{'more than ' if unread else ''}{count} further {unit}{'s were' if several else ' was'}"
    return failed(f"{number} not run: at most {most} run in a turn")


def merged(infos: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what several answers of a turn reported: counts and seconds summed, of anything else the last."""
    out: dict[str, Any] = {}
    for key, value in (item for info in infos for item in info.items()):
        adds = isinstance(value, int) or (isinstance(value, float) and key.endswith("seconds"))
        out[key] = out[key] + value if adds and isinstance(out.get(key), int | float) else value
    return out


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
        self._prompt = replace(prompt)  # an object of this episode alone: tools that belong together know it by that
        self._sessions: dict[str, ToolSession] = {}

    def step(self, text: str, cut: bool = False) -> StepResult:
        """Carry out the calls of a turn; without one, or with an answer, end the episode.

        `info` counts `tool_calls` (made), `tool_errors` (of them, for an unknown tool or bad arguments, and one for all
        calls above the limit) and `malformed_calls` (that could not be read; a last one that was `cut` off is none);
        where tools raised, also `tool_exceptions` and their `tool_tracebacks`.
        """
        turn = parse_tool_calls(text)
        if not turn.actions or last_answer(turn.content) is not None:
            return StepResult(reward=self.finish())
        told, left = self._answers(turn.actions)
        answers = [answer for _, answer in told]
        calls = [answer for action, answer in told if isinstance(action, ToolCall)]
        limits = self._kind.limits
        observation = ObservationBuilder(self._kind.role, limits.text, limits.images)
        for action, answer in told:
            observation.add(answer, **self._fields(action))
        if left:
            observation.add(not_run(left, limits.max_parallel_calls, "call"), **self._fields(left[0]))
        info = merged(answer.info for answer in answers) | {
            "tool_calls": len(calls),
            "tool_errors": sum(answer.failed for answer in calls) + bool(left),
            "malformed_calls": turn.count_malformed(cut),
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

    def _answers(self, actions: Sequence[Action]) -> tuple[list[tuple[Action, ToolAnswer]], list[Action]]:
        """Return actions with their answers, in the model's order, in which calls begin too; and those left out."""
        begun: list[tuple[Action, Answering]] = []
        left: list[Action] = []
        runs = faults = self._kind.limits.max_parallel_calls
        for action in actions:
            fault = self._fault(action)
            if fault is None and isinstance(action, ToolCall) and runs:
                runs -= 1
                begun.append((action, self._session(action.name).call(action.arguments)))
            elif fault is not None and faults:
                faults -= 1
                begun.append((action, fault))
            else:
                left.append(action)
        wait(item for _, item in begun if isinstance(item, Future))
        return [(action, item.result() if isinstance(item, Future) else item) for action, item in begun], left

    def _fault(self, action: Action) -> ToolAnswer | None:
        """Return what is wrong with an action; None for a call that may run, and for what was not read."""
        if isinstance(action, ParseError):
            return None if action.is_surplus else failed(action.message)
        if not isinstance(action, ToolCall):
            return failed("this is no tool call")
        if action.name not in self._kind.tools:
            known = ", ".join(self._kind.tools)
            return failed(f"there is no tool {action.name[:_MAX_NAME_CHARACTERS]!r}; the tools are: {known}")
        problem = self._kind.checkers[action.name].problem(action.arguments)
        return None if problem is None else failed(problem)

    def _fields(self, action: Action) -> dict[str, Any]:
        """Return what stands beside the answer's text: some chat templates want the tool's name."""
        return {"name": action.name} if isinstance(action, ToolCall) and self._kind.role == "tool" else {}

    def _session(self, name: str) -> ToolSession:
        if name not in self._sessions:
            tool = self._kind.tools[name]
            self._sessions[name] = tool.start(self._prompt, self._prompt.tools_kwargs.get(name) or {})
        return self._sessions[name]
