"""The judge against a small server with OpenAI's interface: cache, rate, retries, replies."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.agent.broken_server import BROKEN, broken_server
from vrl.agent.rewards.judge import Judge, JudgeSettings, read_score
from vrl.agent.rewards.registry import find_rule
from vrl.protocol.errors import ConfigError, RewardError


class Server(BaseHTTPRequestHandler):
    """Says what `codes` and `reply` tell it to; keeps what it was asked."""

    codes: list[int] = []  # noqa: RUF012 - shared with the test on purpose
    asked: list[Any] = []  # noqa: RUF012
    reply = "Score: 1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Server.asked.append((self.path, self.headers.get("Authorization"), body))
        code = Server.codes.pop(0) if Server.codes else 200
        if code != 200:
            self.send_error(code)
            return
        answer = json.dumps({"choices": [{"message": {"role": "assistant", "content": Server.reply}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Server.codes, Server.asked, Server.reply = [], [], "Score: 1"
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def settings(url: str, **changed: Any) -> JudgeSettings:
    return JudgeSettings(**{"base_url": url, "model": "m", "requests_per_second": 1000.0, **changed})


def test_what_is_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    rule = find_rule("llm_judge")
    kwargs = {"base_url": url, "model": "m", "api_key_env": "MY_KEY", "requests_per_second": 1000.0}
    asked = {
        "solution_str": "<think>hm</think><answer>{question} 5</answer>",
        "ground_truth": ["five", r"\frac{10}{2}"],
    }
    assert rule(data_source="x", extra_info={"question": "2 + 3?"}, **asked, **kwargs) == 1.0
    path, key, body = Server.asked[0]
    assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", "Bearer secret", "m", 0.0)
    content = body["messages"][0]["content"]
    assert r"Right answer: five or \frac{10}{2}" in content
    assert "Question: 2 + 3?" in content
    assert "Answer to judge: {question} 5" in content  # what is filled in is not filled again
    assert rule(data_source="x", solution_str="<answer></answer>", ground_truth="5", **kwargs) == 0.0
    assert len(Server.asked) == 1
    with pytest.raises(ConfigError, match="unexpected keyword argument 'modle'"):
        rule(data_source="x", solution_str="5", ground_truth="5", modle="m", **kwargs)


def test_equal_questions_are_asked_once(url: str, tmp_path: Path) -> None:
    judge = Judge(settings(url, cache_dir=str(tmp_path / "judge")))
    assert [judge.score("q", "t", answer) for answer in "aab"] == [1.0] * 3
    assert len(Server.asked) == 2
    Server.reply = "Score: 0"
    assert Judge(settings(url, cache_dir=str(tmp_path / "judge"))).score("q", "t", "a") == 1.0  # another process's
    assert Judge(settings(url, cache_dir=str(tmp_path / "judge"), model="n")).score("q", "t", "a") == 0.0
    assert len(Server.asked) == 3


def test_a_process_remembers_the_replies_used_last(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vrl.agent.rewards.judge._MAX_KNOWN", 2)
    judge = Judge(settings(url))
    for answer, asked in (("a", 1), ("b", 2), ("a", 2), ("c", 3), ("a", 3), ("b", 4), ("c", 5)):
        judge.score("q", "t", answer)
        assert len(Server.asked) == asked, answer


def test_retries_and_what_is_not_retried(url: str) -> None:
    judge = Judge(settings(url, max_retries=2))
    Server.codes = [503, 429]
    assert judge.score("q", "t", "a") == 1.0
    assert len(Server.asked) == 3
    Server.codes = [500] * 3
    with pytest.raises(RewardError, match="does not answer: HTTP Error 500"):
        judge.score("q", "t", "b")
    Server.codes = [401]
    with pytest.raises(RewardError, match="401"):
        judge.score("q", "t", "c")
    assert len(Server.asked) == 7
    with pytest.raises(RewardError, match="does not answer"):
        Judge(settings("http://127.0.0.1:9/v1", max_retries=0)).score("q", "t", "a")
    with pytest.raises(ConfigError, match="base_url"):
        Judge(settings("localhost:80"))


def test_a_reply_without_a_score_is_asked_for_again(url: str, tmp_path: Path) -> None:
    Server.reply = "I cannot say"
    judge = Judge(settings(url, cache_dir=str(tmp_path)))
    with pytest.raises(RewardError, match="gave no score: 'I cannot say'"):
        judge.score("q", "t", "a")
    Server.reply = "Score: 1"
    assert judge.score("q", "t", "a") == 1.0
    assert len(Server.asked) == 2


@pytest.mark.parametrize("answer", BROKEN)
def test_an_answer_that_breaks_off_is_tried_again(answer: bytes) -> None:
    with broken_server(answer) as (address, asked):
        with pytest.raises(RewardError, match="does not answer"):
            Judge(settings(address, max_retries=1)).score("q", "t", "a")
        assert len(asked) == 2


def test_the_rate_holds_over_threads(url: str) -> None:
    judge = Judge(settings(url, requests_per_second=20.0))
    start = time.monotonic()
    threads = [threading.Thread(target=judge.score, args=("q", "t", str(n))) for n in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start >= 8 / 20
    assert len(Server.asked) == 9


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 1", 1.0),
        ("I think so.\n**Score:** 0.5", 0.5),
        ("Score: 0 ... no, score = 1", 1.0),
        ("score 7", 1.0),
        ("Score: -3", 0.0),
        ("Yes, it is.", 1.0),
        ("no", 0.0),
        ("0", 0.0),
        ("Perhaps", None),
        ("Score: 1e-1", 0.1),
        ("Score: .5", 0.5),
        ("Score: -0.5", 0.0),
        ("Score: 1/10", 0.1),
        ("Score: 8 / 10.", 0.8),
        ("Score: 8 out of 10", 0.8),
        ("Score: 1.", 1.0),
        ("Score: 10", 1.0),
        ("0.5", 0.5),
        (".5", 0.5),
        ("**0.5**", 0.5),
        ("10", 1.0),
        ("3/4", 0.75),
        ("1, they are the same", 1.0),
        ("Score: 0,5", None),
        ("0,5", None),
        ("Score: 50%", None),
        ("Score: 1/x", None),
        ("Score: 1/0", None),
        ("Score: 1.2.3", None),
        ("Score: 1x", None),
        ("2 of them are right", None),
        ("", None),
        ("score" * 10000, None),
    ],
)
def test_replies(reply: str, score: float | None) -> None:
    assert read_score(reply) == score
