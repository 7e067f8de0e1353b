"""What a server streams becomes a sample: tokens are counted, and a server that made others is refused."""

from __future__ import annotations

import json

import pytest

from gc_sidecar.sweep.driver import DriveError, Driver, sample_of
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
        ([], "made 0 of 4"),
        ([usage(4)], "made 4 of 4"),
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
