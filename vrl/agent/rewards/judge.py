"""A language model as judge, over any server with OpenAI's chat interface."""

import hashlib
import http.client
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, final

from vrl.agent.rewards.answers import read_answer, true_answers
from vrl.agent.rewards.registry import register_reward
from vrl.protocol.errors import ConfigError, RewardError

PROMPT: Final = """\
You compare an answer with the right one. Reply with Score: 1 when they mean the same, with Score: 0 when they do not.

Question: {question}
Right answer: {ground_truth}
Answer to judge: {answer}
"""
_NUMBER: Final = r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?"
# A number or a fraction, whole: nothing follows that could belong to it ("0,5", "1/x", "50%", "1.2.3").
_VALUE: Final = re.compile(rf"({_NUMBER})(?:\s*(?:/|out of)\s*({_NUMBER}))?(?!\s*[/%]|\s*out of|\w|[.,][0-9])")
_MARK: Final = re.compile(r"score[^\w.+-]{0,5}(?=[-+]?\.?[0-9])", re.IGNORECASE)
_WORDS: Final = {"yes": 1.0, "correct": 1.0, "true": 1.0, "no": 0.0, "incorrect": 0.0, "false": 0.0, "1": 1.0, "0": 0.0}
_AROUND: Final = " .,:;!*`\"'"
_RETRIED: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_SLOT: Final = re.compile(r"\{(question|ground_truth|answer)\}")
_MAX_CHARACTERS: Final = 4000  # of each part of the question
_MAX_REPLY_BYTES: Final = 1_000_000
_MAX_KNOWN: Final = 10_000  # replies that a process remembers


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings:
    """Where the judge is and how often it may be asked."""

    base_url: str  # up to and with /v1
    model: str
    prompt: str = PROMPT  # with {question}, {ground_truth}, {answer}
    api_key_env: str = "OPENAI_API_KEY"  # name of the environment variable that holds the key; unset: none is sent
    requests_per_second: float = 5.0  # of this process; every rollout worker has reward_model.num_workers of them
    timeout: float = 20.0  # seconds a request
    max_retries: int = 4
    max_tokens: int = 64  # of the reply
    cache_dir: str | None = None  # folder of replies, shared by processes and runs; null: the latest, in this process


@final
class Judge:
    """Asks for scores; equal questions are asked once. Safe to use from several threads."""

    def __init__(self, settings: JudgeSettings) -> None:
        if not settings.base_url.startswith(("http://", "https://")) or settings.requests_per_second <= 0:
            raise ConfigError(
                f"the judge needs base_url with http:// or https:// and requests_per_second above 0, got "
                f"{settings.base_url!r} and {settings.requests_per_second}"
            )
        self._settings = settings
        self._known = OrderedDict[str, str]()  # the one used last stands last
        self._lock = threading.Lock()
        self._next = 0.0

    def score(self, question: str, ground_truth: str, answer: str) -> float:
        """Return what the judge says, between 0 and 1.

        Raises RewardError when it does not answer or says nothing that is a score.
        """
        values = {"question": question, "ground_truth": ground_truth, "answer": answer}
        prompt = _SLOT.sub(lambda slot: values[slot[1]][:_MAX_CHARACTERS], self._settings.prompt)
        return self._score(prompt)

    def _score(self, prompt: str) -> float:
        request = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
            "max_tokens": self._settings.max_tokens,
        }
        body = json.dumps(request, sort_keys=True).encode()
        key = hashlib.sha256(self._settings.base_url.encode() + b"\n" + body).hexdigest()
        known = self._remembered(key)
        score = None if known is None else read_score(known)
        if score is not None:
            return score
        reply = self._ask(body)
        score = read_score(reply)
        if score is None:  # not remembered: the next try may bring one
            raise RewardError(f"the judge {self._settings.model} gave no score: {reply[:200]!r}")
        self._remember(key, reply)
        return score

    def _ask(self, body: bytes) -> str:
        headers = {"Content-Type": "application/json"}
        if secret := os.environ.get(self._settings.api_key_env):
            headers["Authorization"] = f"Bearer {secret}"
        url = f"{self._settings.base_url.rstrip('/')}/chat/completions"
        for attempt in range(self._settings.max_retries + 1):
            self._wait_for_turn()
            try:
                sent = urllib.request.Request(url, body, headers)
                with urllib.request.urlopen(sent, timeout=self._settings.timeout) as answer:
                    content = json.loads(answer.read(_MAX_REPLY_BYTES))["choices"][0]["message"]["content"]
                    return str(content or "")
            except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
                refused = isinstance(error, urllib.error.HTTPError) and error.code not in _RETRIED
                if refused or attempt == self._settings.max_retries:
                    raise RewardError(f"the judge at {url} does not answer: {error}") from error
            time.sleep(min(0.2 * 2**attempt, 5.0))
        raise AssertionError("the last attempt returns or raises")

    def _wait_for_turn(self) -> None:
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + 1.0 / self._settings.requests_per_second
        time.sleep(turn - now)

    def _remembered(self, key: str) -> str | None:
        with self._lock:
            known = self._known.get(key)
        if known is None and self._settings.cache_dir is not None:
            try:
                known = self._file(key).read_text(encoding="utf-8")
            except OSError:
                return None
        if known is not None:
            self._keep(key, known)
        return known

    def _keep(self, key: str, reply: str) -> None:
        with self._lock:
            self._known[key] = reply
            self._known.move_to_end(key)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def _remember(self, key: str, reply: str) -> None:
        self._keep(key, reply)
        if self._settings.cache_dir is not None:
            path = self._file(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
            part.write_text(reply, encoding="utf-8")
            part.replace(path)

    def _file(self, key: str) -> Path:
        return Path(self._settings.cache_dir or "").expanduser() / key[:2] / key


def read_score(reply: str) -> float | None:
    """Return the last `Score: x` of a reply, held within 0 and 1; without one its first line, if that is a number.

    Else what its first word says (yes, no, ...). A score may be a fraction, as 8/10. None for what is no whole number:
    it is never read in part.
    """
    marks = list(_MARK.finditer(reply))
    if marks:
        return _held(_VALUE.match(reply, marks[-1].end()))
    lines = reply.strip().lower().splitlines()
    if not lines:
        return None
    number = _VALUE.fullmatch(lines[0].strip(" *`\"'"))
    return _held(number) if number else _WORDS.get(lines[0].split(maxsplit=1)[0].strip(_AROUND))


def _held(value: re.Match[str] | None) -> float | None:
    if value is None:
        return None
    whole = 1.0 if value[2] is None else float(value[2])
    return None if whole <= 0 else min(max(float(value[1]) / whole, 0.0), 1.0)


@cache
def _judge(settings: JudgeSettings) -> Judge:
    return Judge(settings)


@register_reward("llm_judge")
def compute_score(
    *,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    data_source: str = "llm_judge",
    **settings: Any,
) -> float:
    """Return the judge's score of the answer; the question is `extra_info["question"]`.

    Keyword arguments are those of `JudgeSettings`. An empty answer is 0 without a question. Raises RewardError when the
    judge cannot be asked, ConfigError for settings that do not do.
    """
    answer = read_answer(solution_str)
    if not answer:
        return 0.0
    try:
        judge = _judge(JudgeSettings(**settings))
    except TypeError as error:
        raise ConfigError(f"{data_source}: settings of the judge: {error}") from error
    question = str((extra_info or {}).get("question", ""))
    return judge.score(question, " or ".join(true_answers(ground_truth)), answer)
