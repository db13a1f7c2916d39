"""Search as a tool: over a corpus on this machine (BM25), or by a retrieval server (Search-R1's protocol)."""

import http.client
import json
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import bm25s
from bm25s.tokenization import Tokenized

from vrl.agent.tools.types import (
    StatelessTool,
    ToolAnswer,
    ToolFailure,
    ToolResources,
    check_settings,
    failed,
    function_schema,
)
from vrl.protocol.errors import ConfigError
from vrl.protocol.trajectory import Prompt

_MAX_QUERY_CHARACTERS: Final = 1000
_MAX_QUERIES: Final = 10  # of one call
_MAX_ANSWER_BYTES: Final = 4_000_000
_THREADS: Final = 8

SCHEMA: Final = function_schema(
    "search",
    "Search for documents that answer a query.",
    {"query": {"type": "string", "description": "What to search for."}},
    "query",
)


def search_tool(config: Mapping[str, Any], resources: ToolResources) -> StatelessTool:  # noqa: ARG001 - as registered
    """Return the tool `search` over a local corpus.

    `config`: `corpus_path`, a jsonl file with `contents` (first line the title, as in Search-R1) or `title` and
    `text` in each line; `topk` documents an answer (3); BM25's `k1` (1.5) and `b` (0.75). The index is made when the
    process starts. Raises ConfigError when the corpus cannot be read.
    """
    check_settings(config, ("corpus_path", "topk", "k1", "b"), "the tool search")
    topk = _topk(config)
    documents = _read_corpus(config)
    index = bm25s.BM25(k1=float(config.get("k1", 1.5)), b=float(config.get("b", 0.75)))
    index.index(bm25s.tokenize(documents, show_progress=False), show_progress=False)

    def find(query: str) -> list[str]:
        words = bm25s.tokenize(query, show_progress=False, allow_empty=True)
        if not isinstance(words, Tokenized) or not words.vocab.keys() & index.vocab_dict.keys():
            return []
        found, scores = index.retrieve(words, k=min(topk, len(documents)), show_progress=False, n_threads=0)
        return [documents[number] for number, score in zip(found[0], scores[0], strict=True) if score > 0]

    def call(_prompt: Prompt, arguments: Mapping[str, Any]) -> ToolAnswer:
        queries = _queries(arguments)
        return _answer([find(query) for query in queries])

    return StatelessTool(SCHEMA, call)


def retriever_tool(config: Mapping[str, Any], resources: ToolResources) -> StatelessTool:  # noqa: ARG001 - as registered
    """Return the tool `search` that asks a server: POST `{"queries": [...], "topk": k, "return_scores": true}`.

    `config`: `retrieval_service_url`, `topk` (3), `timeout` in seconds (30), `max_retries` (3, with growing waits).
    A server that stays away fails the episode (ToolFailure); it is not the model's fault.
    """
    check_settings(config, ("retrieval_service_url", "topk", "timeout", "max_retries"), "the tool retriever")
    url = config.get("retrieval_service_url")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise ConfigError(f"the tool retriever: retrieval_service_url={url!r} is no http address")
    topk, retries = _topk(config), int(config.get("max_retries", 3))
    timeout = float(config.get("timeout", 30.0))

    def ask(arguments: Mapping[str, Any]) -> ToolAnswer:
        queries = _queries(arguments)
        if not queries:
            return _answer([])
        answer = _post(url, {"queries": queries, "topk": topk, "return_scores": True}, timeout, retries)
        try:
            found = [[_contents(item) for item in answer["result"][number]] for number in range(len(queries))]
        except (KeyError, IndexError, TypeError) as error:
            raise ToolFailure(f"{url} answers in another form than Search-R1's: {error!r}") from error
        return _answer(found)

    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="retriever")
    return StatelessTool(SCHEMA, lambda _, arguments: threads.submit(ask, arguments), threads.shutdown)


def _topk(config: Mapping[str, Any]) -> int:
    topk = config.get("topk", 3)
    if type(topk) is not int or topk < 1:
        raise ConfigError(f"a search tool: topk={topk!r} must be a whole number of at least 1")
    return topk


def _queries(arguments: Mapping[str, Any]) -> list[str]:
    """Return the query, or the queries of `query_list`, as verl's search tool calls them."""
    given = arguments.get("query_list", arguments.get("query", ""))
    listed = given if isinstance(given, list) else [given]
    return [str(query)[:_MAX_QUERY_CHARACTERS] for query in listed[:_MAX_QUERIES]]


def _answer(found: Sequence[Sequence[str]]) -> ToolAnswer:
    """Return the documents of each query."""
    if not found:
        return failed("there is no query")
    parts = [_listed(documents) if documents else "No document matches." for documents in found]
    return ToolAnswer(text="\n---\n".join(parts))


def _read_corpus(config: Mapping[str, Any]) -> list[str]:
    path = config.get("corpus_path")
    if path is None:
        raise ConfigError("the tool search: corpus_path must name a jsonl file")
    documents: list[str] = []
    try:
        with Path(path).expanduser().open(encoding="utf-8") as lines:
            documents.extend(_document(json.loads(line)) for line in lines if line.strip())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the tool search: corpus_path={path}, line {len(documents) + 1}: {error}") from error
    if not documents:
        raise ConfigError(f"the tool search: corpus_path={path} holds no document")
    return documents


def _document(row: Mapping[str, Any]) -> str:
    contents = row.get("contents")
    return str(contents) if contents is not None else f"{row.get('title', '')}\n{row['text']}".strip()


def _contents(item: Mapping[str, Any]) -> str:
    document = item.get("document", item)
    return str(document["contents"])


def _listed(documents: Sequence[str]) -> str:
    """Return documents in Search-R1's form, the first line of each being its title."""
    parts = []
    for number, document in enumerate(documents, 1):
        title, _, text = document.partition("\n")
        parts.append(f"Doc {number} (Title: {title.strip()}) {text.strip()}".rstrip())
    return "\n\n".join(parts)


def _post(url: str, request: Mapping[str, Any], timeout_seconds: float, retries: int) -> Any:
    data = json.dumps(request).encode()
    for attempt in range(retries + 1):
        try:
            sent = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(sent, timeout=timeout_seconds) as answer:
                return json.loads(answer.read(_MAX_ANSWER_BYTES))
        except (OSError, http.client.HTTPException, ValueError) as error:
            if attempt == retries:
                raise ToolFailure(f"the retriever {url} does not answer: {error}") from error
            time.sleep(min(0.2 * 2**attempt, 5.0))
    raise AssertionError("the last attempt returns or raises")
