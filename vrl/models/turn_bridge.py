"""The ids between two model turns: what a chat template writes from the end of an answer to the next one's start.

`TurnBridge` belongs to the renderer. It renders a fixed conversation with the new messages behind its answer and cuts
at the answer: what follows is the bridge, in the template's own form. That a row made so equals the whole conversation
rendered at once is proved for each kind of observation before its first use.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

from jinja2 import TemplateError

from vrl.protocol.errors import ConfigError, DataError

Message = Mapping[str, Any]

_QUESTION: Final = {"role": "user", "content": "Question"}
_ANSWER: Final = "Xanswerx"
_PRIVATE_USE: Final = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
_NO_TEXT: Final = frozenset({"role", "type"})  # of a message or a part: names, not text


@final
class TurnBridge:
    """Makes and proves bridges.

    Args:
        text_of: renders messages, with the generation prompt when asked for.
        encode: text to ids; special tokens in it become their ids.
        special: every token that text must not be able to spell.
        closers: the tokens that may end a turn, by their text.
    """

    def __init__(
        self,
        text_of: Callable[[Sequence[Message], bool], str],
        encode: Callable[[str], list[int]],
        special: Sequence[str],
        closers: Mapping[str, int],
    ) -> None:
        self._text_of = text_of
        self._encode = encode
        self._spelled = re.compile("|".join(f"(?={re.escape(token)})" for token in sorted(special) if len(token) > 1))
        self._closers = closers
        self._proved: set[tuple[object, ...]] = set()

    def ids(self, messages: Sequence[Message], last_id: int) -> list[int]:
        """Return the ids that follow a sampled turn: its closer if it did not sample it, the messages, the next start.

        Args:
            messages: after the answer; image parts are typed, texts are literal.
            last_id: the last id of the sampled turn.

        Raises:
            ConfigError: the template has no turn-by-turn form for such messages.
        """
        shape = tuple((message.get("role"), _has_image(message)) for message in messages)
        if shape not in self._proved:
            self._prove(messages)
            self._proved.add(shape)
        return self._bridge(messages, last_id)

    def _bridge(self, messages: Sequence[Message], last_id: int) -> list[int]:
        pause = _unused_character(messages)
        safe = [_mapped(message, lambda text: self._broken(text, pause)) for message in messages]
        text = self._after_answer(safe)
        closer = next((token for token in self._closers if text.startswith(token)), None)
        if closer is None:
            raise self._refusal(messages, f"an answer is followed by {text[:20]!r} and not by an end token")
        if last_id == self._closers[closer]:
            text = text.removeprefix(closer)
        return [token for piece in text.split(pause) for token in self._encode(piece)]

    def _after_answer(self, messages: Sequence[Message]) -> str:
        conversation = [_QUESTION, {"role": "assistant", "content": _ANSWER}, *messages]
        try:
            before, answer, after = self._text_of(conversation, True).partition(_ANSWER)
        except (TemplateError, TypeError) as error:
            raise self._refusal(messages, f"are refused: {error}") from error
        if not answer or not before:
            raise self._refusal(messages, "make it leave the answer before them out")
        return after

    def _broken(self, text: str, pause: str) -> str:
        """Put a pause behind the first character of every special token that the text spells."""
        places = [match.start() + 1 for match in self._spelled.finditer(text)]
        return pause.join(text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True))

    def _prove(self, messages: Sequence[Message]) -> None:
        """Compare one and two turns, put together from their parts, with the whole conversation rendered at once."""
        parts = self._encode(self._text_of([_QUESTION], True))
        whole: list[Message] = [_QUESTION]
        for turn in range(2):
            plain = [
                _mapped(message, lambda _, word=f"Result{turn}{number}": word)
                for number, message in enumerate(messages)
            ]
            parts = [*parts, *self._encode(_ANSWER), *self._bridge(plain, -1)]
            whole += [{"role": "assistant", "content": _ANSWER}, *plain]
            if self._encode(self._text_of(whole, True)) != parts:
                raise self._refusal(messages, f"change how it writes the conversation before them (turn {turn + 1})")

    @staticmethod
    def _refusal(messages: Sequence[Message], why: str) -> ConfigError:
        roles = [message.get("role") for message in messages]
        return ConfigError(
            f"the chat template cannot be continued turn by turn: after an answer, messages with roles {roles} {why}; "
            "use a model whose template writes past turns as they were, or give it another chat_template"
        )


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a message with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: item if key in _NO_TEXT else _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value


def _has_image(message: Message) -> bool:
    content = message.get("content")
    return content is not None and not isinstance(content, str) and any(part.get("type") == "image" for part in content)


def _unused_character(messages: Sequence[Message]) -> str:
    used: set[str] = set()
    for message in messages:
        _mapped(message, lambda text: used.update(text) or text)
    character = next((chr(code) for codes in _PRIVATE_USE for code in codes if chr(code) not in used), None)
    if character is None:
        raise DataError("an observation uses every private character of Unicode")
    return character
