"""What a server streams becomes a sample: tokens are counted, and a server that made others is refused."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable

import pytest

from gc_sidecar.sweep import driver as driver_module
from gc_sidecar.sweep.driver import DriveError, Driver, Sample, sample_of
from gc_sidecar.sweep.plan import Point

POINT = Point(16, 4, 1)


def token(text: str = "x") -> str:
    return json.dumps({"choices": [{"text": text}]})


def usage(completion_tokens: int) -> str:
    return json.dumps({"choices": [], "usage": {"completion_tokens": completion_tokens}})


def timed(*events: str) -> list[tuple[float, str]]:
    return [(1.0 + number, event) for number, event in enumerate(events)]


def test_each_token_has_its_time_and_the_usage_is_none() -> None:
    sample = sample_of(POINT, 0.5, timed(*[token()] * 4, usage(4)))
    assert (sample.started_s, sample.tokens_s, sample.together) == (0.5, (1.0, 2.0, 3.0, 4.0), 0)


def test_tokens_that_came_together_are_told() -> None:
    sample = sample_of(POINT, 0.5, timed(token(), token("two more"), token(), usage(4)))
    assert (len(sample.tokens_s), sample.together) == (3, 1)


def test_a_server_that_tells_no_usage_sends_one_event_for_each() -> None:
    assert sample_of(POINT, 0.5, timed(*[token()] * 4)).together == 0
    with pytest.raises(DriveError, match="made 3 of 4 tokens: it must know ignore_eos"):
        sample_of(POINT, 0.5, timed(*[token()] * 3))


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([], "no token could be read"),
        (["[DONE]"], "no token could be read"),
        ([usage(4)], "no token could be read"),
        ([*[token()] * 4, usage(3)], "made 3 of 4"),
        ([token(), '{"error": {"message": "EngineCore died"}}'], "failed.*EngineCore died"),
        ([token(), "{"], "failed"),
        ([token(), "[]"], "failed"),
        ([token(), '{"choices": null}'], "failed"),
        ([token(), '{"choices": [], "usage": {}}'], "failed"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(events: list[str], told: str) -> None:
    with pytest.raises(DriveError, match=told):
        sample_of(POINT, 0.5, timed(*events))


def test_a_slash_at_its_end_makes_no_other_engine() -> None:
    assert Driver("http://a:8000/", None, None).url == Driver("http://a:8000", None, None).url


def test_prompts_of_a_block_depend_on_seed_and_block_alone() -> None:
    def prompts(seed: int | None, *blocks: int) -> list[bytes]:
        driver, found = Driver("http://a", "model", seed), []
        for block in blocks:
            driver.begin(block)
            found.append(driver.body(POINT))
        return found

    first, second = prompts(7, 0, 1)
    assert first != second
    assert prompts(7, 1) == [second]
    assert prompts(8, 0) != [first]
    assert prompts(None, 0) != prompts(None, 0)


# --- over a connection ---


def driven(chunks: Iterable[tuple[float, bytes]]) -> list[Sample]:
    """What is measured of a server that waits so long before each of these, and then leaves."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        try:
            for wait_s, chunk in chunks:
                await asyncio.sleep(wait_s)
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    async def both() -> list[Sample]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await Driver(f"http://127.0.0.1:{port}", "model", 1).drive(POINT, 1, 0)
        finally:
            server.close()

    return asyncio.run(both())


def test_a_token_with_an_unescaped_line_separator_is_a_token() -> None:
    event = json.dumps({"choices": [{"text": "a\u2028b\u0085c"}]}, ensure_ascii=False)
    (sample,) = driven([(0.01, f"data:{event}\n\n".encode())] * 4 + [(0, b"data: [DONE]\n\n")])
    assert len(sample.tokens_s) == 4
    assert sample.tokens_s[-1] - sample.tokens_s[0] > 0.025


def test_a_server_that_sends_only_comments_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "TIMEOUT_S", 0.5)
    chunks = [(0.0, f"data: {token()}\n\n".encode()), *[(0.1, b": keep-alive\n\n")] * 100]
    began_s = time.monotonic()
    with pytest.raises(DriveError, match=r"at 16/4x1 .*sent no event for 0\.5 s"):
        driven(chunks)
    assert time.monotonic() - began_s < 5


def test_a_server_that_comments_while_it_works_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver_module, "TIMEOUT_S", 1.0)
    one = [*[(0.1, b": keep-alive\n\n")] * 4, (0.0, f"data: {token()}\n\n".encode())]
    (sample,) = driven(one * 4)
    assert len(sample.tokens_s) == 4
