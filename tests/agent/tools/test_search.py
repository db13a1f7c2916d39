"""Search over a corpus against BM25 written out, and over a server that speaks Search-R1's protocol."""

import json
import math
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.agent.broken_server import BROKEN, broken_server
from tests.agent.episodes import call, prompt, texts
from vrl.agent.environments.tool_calls import ToolKind, TurnLimits
from vrl.agent.tools.registry import build_tool
from vrl.agent.tools.types import ToolAnswer, ToolFailure, ToolResources
from vrl.protocol.errors import ConfigError

DOCUMENTS = {
    "Paris": "Paris is the capital of France and its largest city.",
    "Berlin": "Berlin is the capital of Germany. The wall in Berlin fell.",
    "Cats": "Cats sleep sixteen hours a day.",
    "Dogs": "Dogs sleep less than cats do.",
    "France": "France makes cheese, wine and bread.",
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [{"id": str(n), "contents": f"{title}\n{text}"} for n, (title, text) in enumerate(DOCUMENTS.items())]
    rows[2] = {"title": "Cats", "text": DOCUMENTS["Cats"]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def search(query: Any, **config: Any) -> ToolAnswer:
    answer = build_tool("search", config, ToolResources()).start(prompt(), {}).call({"query": query})
    assert isinstance(answer, ToolAnswer)
    return answer


def titles(text: str) -> list[str]:
    return re.findall(r"\(Title: (\w+)\)", text)


def slow_ranking(query: str, k1: float, b: float) -> list[str]:
    """BM25 as Lucene has it; words of two letters or more, without English stop words of this corpus."""
    stop = {"is", "the", "of", "and", "in", "its", "than", "do"}
    split = {
        title: [w for w in re.findall(r"\b\w\w+\b", f"{title} {text}".lower()) if w not in stop]
        for title, text in DOCUMENTS.items()
    }
    mean = sum(map(len, split.values())) / len(split)
    scores = {}
    for title, words in split.items():
        counts, score = Counter(words), 0.0
        for word in re.findall(r"\b\w\w+\b", query.lower()):
            have = sum(word in other for other in split.values())
            idf = math.log(1 + (len(split) - have + 0.5) / (have + 0.5))
            score += idf * counts[word] / (counts[word] + k1 * (1 - b + b * len(words) / mean))
        scores[title] = score
    return [title for title in sorted(scores, key=lambda t: -scores[t]) if scores[title] > 0]


@pytest.mark.parametrize("query", ["capital France", "berlin wall", "cats sleep", "cheese", "Germany cats dogs"])
def test_the_ranking_is_bm25s(corpus: Path, query: str) -> None:
    assert titles(search(query, corpus_path=str(corpus), topk=5).text) == slow_ranking(query, 1.5, 0.75)


def test_what_a_search_returns(corpus: Path) -> None:
    text = search("capital of Germany", corpus_path=str(corpus), topk=1).text
    assert text == f"Doc 1 (Title: Berlin) {DOCUMENTS['Berlin']}"
    index = build_tool("search", {"corpus_path": str(corpus), "topk": 1}, ToolResources()).start(prompt(), {})
    both = index.call({"query_list": ["zebra", "Germany"]})
    assert isinstance(both, ToolAnswer)
    assert both.text == f"No document matches.\n---\n{text}"
    empty = index.call({"query_list": []})
    assert isinstance(empty, ToolAnswer)
    assert empty.failed
    for nothing in ("", "the of", "zebra", "\x00", "?" * 9999, "\U0001f408"):
        assert search(nothing, corpus_path=str(corpus)).text == "No document matches."


def test_a_bad_corpus_is_a_bad_setting(tmp_path: Path) -> None:
    for config, message in (
        ({}, "corpus_path must name"),
        ({"corpus_path": "missing.jsonl"}, "No such file"),
        ({"corpus_path": "x", "topk": 0}, "topk=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            search("x", **config)
    (tmp_path / "bad.jsonl").write_text('{"contents": "a"}\n{"other": 1}\n')
    with pytest.raises(ConfigError, match="line 2: 'text'"):
        search("x", corpus_path=str(tmp_path / "bad.jsonl"))


class Retriever(BaseHTTPRequestHandler):
    failures = 0
    requests: list[Any] = []  # noqa: RUF012 - for the test to read

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Retriever.requests.append(request)
        if Retriever.failures > 0:
            Retriever.failures -= 1
            self.send_error(503)
            return
        found = [{"document": {"contents": f"T{n}\nabout {request['queries'][0]}"}, "score": 1.0} for n in range(2)]
        body = json.dumps({"result": [found]} if request["queries"][0] != "odd" else {"results": []}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Retriever) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/retrieve"
        server.shutdown()
        thread.join()


def test_a_retrieval_server(url: str) -> None:
    tool = build_tool("retriever", {"retrieval_service_url": url, "topk": 2, "max_retries": 2}, ToolResources())
    kind = ToolKind([tool], TurnLimits(max_parallel_calls=2))
    environment = kind.start(prompt())
    assert texts(environment.step(call("search", query="cats") + call("search", query="dogs"))) == [
        f"Doc 1 (Title: T0) about {word}\n\nDoc 2 (Title: T1) about {word}" for word in ("cats", "dogs")
    ]
    assert sorted(Retriever.requests, key=str)[0] == {"queries": ["cats"], "topk": 2, "return_scores": True}
    Retriever.failures = 2
    assert "T0" in texts(environment.step(call("search", query="cats")))[0]
    Retriever.failures = 3
    with pytest.raises(ToolFailure, match="does not answer"):
        environment.step(call("search", query="cats"))
    with pytest.raises(ToolFailure, match="another form"):
        environment.step(call("search", query="odd"))
    kind.close()
    with pytest.raises(ConfigError, match="no http address"):
        build_tool("retriever", {"retrieval_service_url": "file:///etc/passwd"}, ToolResources())


@pytest.mark.parametrize("answer", BROKEN)
def test_an_answer_that_breaks_off_is_tried_again(answer: bytes) -> None:
    with broken_server(answer) as (address, asked):
        tool = build_tool("retriever", {"retrieval_service_url": address, "max_retries": 1}, ToolResources())
        answering = tool.start(prompt(), {}).call({"query": "a"})
        assert isinstance(answering, Future)
        with pytest.raises(ToolFailure, match="does not answer"):
            answering.result()
        tool.close()
        assert len(asked) == 2
