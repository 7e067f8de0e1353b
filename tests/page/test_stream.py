"""The page's connection: what comes too late is not shown as of now, and nobody is asked without a pause."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.page.browser import Tab
from tests.page.told import PAGE, state

pytestmark = pytest.mark.xdist_group("page")

EVERY_S = 0.25


class StandInStream(ThreadingHTTPServer):
    """Streams of events: each time that passes is told as `pace` of it, and each ends after `lasts_s`."""

    daemon_threads = True

    def __init__(self, pace: float, lasts_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pace, self.lasts_s = pace, lasts_s
        self.asked = 0


class _Handler(BaseHTTPRequestHandler):
    server: StandInStream

    def log_message(self, *_: object) -> None:
        """Not on the terminal."""

    def do_GET(self) -> None:
        self.server.asked += 1
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        began, first = time.monotonic(), time.time()
        for name, data in PAGE.items():
            self.wfile.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())
        with contextlib.suppress(OSError):
            while (passed_s := time.monotonic() - began) < self.server.lasts_s:
                told = json.dumps(state(time=first + self.server.pace * passed_s))
                self.wfile.write(f"id: 00000000-1\nevent: state\ndata: {told}\n\n".encode())
                time.sleep(EVERY_S)


@contextlib.contextmanager
def streaming(opened: Tab, pace: float = 1.0, lasts_s: float = 60.0) -> Iterator[StandInStream]:
    """The page's events come from a stand-in."""
    with StandInStream(pace, lasts_s) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/gc/events"
        opened.page.route("**/gc/events*", lambda route: route.continue_(url=url))
        try:
            yield server
        finally:
            server.shutdown()


def test_what_is_held_back_on_the_way_is_not_taken_for_now(opened: Tab) -> None:
    with streaming(opened, pace=0.2) as server:
        opened.open()
        assert opened.text("answer") == "Yes."
        opened.until("why", "what it tells comes too late")
        assert opened.text("answer") == "Not known."
        opened.until_live()
        assert server.asked == 2


def test_a_stream_that_keeps_its_pace_stays(opened: Tab) -> None:
    with streaming(opened) as server:
        opened.open()
        opened.page.wait_for_timeout(8000)
        assert (opened.text("answer"), server.asked) == ("Yes.", 1)


def test_streams_that_end_at_once_are_asked_for_ever_more_seldom(opened: Tab) -> None:
    with streaming(opened, lasts_s=0.1) as server:
        opened.open()
        opened.page.wait_for_timeout(8000)
        assert 2 <= server.asked <= 12
