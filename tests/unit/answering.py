"""A stand-in sidecar that answers by route, for verbs that ask for more than one thing."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.unit.agent.test_client import PROBLEM

Answering = Callable[[dict[str, list[str]]], Any]


class AnsweringSidecar:
    """It answers each route with its entry in `answers`: a document, or a function of the query; else 404.

    With a `failure`, a status and a document, it answers every route with that.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Any | Answering] = {}
        self.failure: tuple[int, dict[str, Any]] | None = None
        self.paths: list[str] = []
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stand_in.paths.append(self.path)
                status, document = stand_in._answer(self.path)
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )

    def __enter__(self) -> AnsweringSidecar:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, path: str) -> tuple[int, Any]:
        if self.failure is not None:
            return self.failure
        parts = urlsplit(path)
        answer = self.answers.get(parts.path)
        if answer is None:
            return 404, {**PROBLEM, "status": 404, "code": "not_found"}
        return 200, answer(parse_qs(parts.query)) if callable(answer) else answer


def pause(**rest: Any) -> dict[str, Any]:
    """One pause as the sidecar tells it."""
    return {
        "started_at": "2026-12-01T09:00:00.500Z",
        "duration_s": 0.335000001,
        "role": "worker",
        "roles": ["worker"],
        "dp_rank": 0,
        "rank": 0,
        "pid": 5425,
        "gc_generation": 2,
        "trigger": "auto",
        "collected_objects": 1234,
        **rest,
    }


def no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody had set any."""
    for name in [name for name in os.environ if name.startswith(("GC_SIDECAR_", "NO_COLOR"))]:
        monkeypatch.delenv(name)
