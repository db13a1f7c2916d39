"""What parsers return. A turn's actions stand in the order in which the model wrote them; nothing is dropped."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from vrl.agent.parsers.thinking import OPEN, Thoughts

MAX_ACTIONS: Final = 32  # a turn; the rest becomes one error
MAX_ACTION_CHARACTERS: Final = 100_000  # of one call or cell


@final
@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that reads well: a name and an object of JSON values. Whether such a tool exists is not known here."""

    name: str
    arguments: Mapping[str, Any]


@final
@dataclass(frozen=True, slots=True)
class CodeCell:
    """Code to run, without the lines of its fence and without a final newline."""

    code: str


@final
@dataclass(frozen=True, slots=True)
class ParseError:
    """What looks like a call or cell and is none.

    `kind` is for counting: unclosed, unopened, empty, bad_json, not_object, missing_name, bad_name, missing_arguments,
    bad_arguments, too_long, too_many. `message` tells the model what to write instead.
    """

    kind: str
    message: str

    @property
    def is_surplus(self) -> bool:
        """Whether it stands for the actions that were too many for a turn to be read."""
        return self.kind == "too_many"


Action = ToolCall | CodeCell | ParseError


@final
@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """The actions of a turn, and the text around them without what the model thought."""

    actions: tuple[Action, ...]
    content: str

    def count_malformed(self, cut: bool) -> int:
        """Return how many actions could not be read; one whose end was `cut` off with the turn's is no mistake."""
        errors = [action for action in self.actions if isinstance(action, ParseError)]
        halved = cut and bool(errors) and errors[-1] is self.actions[-1] and errors[-1].kind == "unclosed"
        return sum(not error.is_surplus for error in errors) - halved


@final
class TurnBuilder:
    """Walks through a turn: what is action, what is text between actions, what is thought."""

    def __init__(self, text: str, unit: str) -> None:
        self._text = text
        self._unit = unit
        self._thoughts = Thoughts(text)
        self._actions: list[Action] = []
        self._content: list[str] = []
        self.position = self._thoughts.start_of_speech  # characters read so far
        self.num_found = 0  # actions, the one that was too many included

    @property
    def full(self) -> bool:
        """Whether there were too many actions; the rest of the text is not read, which bounds the time."""
        return self.num_found > MAX_ACTIONS

    def say(self, end: int) -> None:
        """Take the text up to `end` as text."""
        self._content.append(self._text[self.position : end])
        self.position = end

    def skip_thought(self, start: int) -> None:
        """Leave out the thought that opens at `start`; a tag that is never closed is text."""
        end = self._thoughts.end(start)
        self.say(start if end else start + len(OPEN))
        self.position = end or self.position

    def act(self, action: Action, end: int) -> None:
        """Take the text up to `end` as an action."""
        self.position = end
        self.num_found += 1
        if self.full:
            text = f"More than {MAX_ACTIONS} {self._unit}s in one turn; the rest was left out. Write fewer."
            action = ParseError("too_many", text)
        self._actions.append(action)

    def build(self) -> ParsedTurn:
        """Return what was found; the text that is left is text."""
        self.say(len(self._text))
        return ParsedTurn(tuple(self._actions), "".join(self._content))
