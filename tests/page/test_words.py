"""Times and sentences, as people read them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.page.browser import Browser, Tab, tab
from tests.page.told import tell

pytestmark = pytest.mark.xdist_group("page")


def words(opened: Tab, expression: str, argument: Any) -> Any:
    """The value of an expression of words.js."""
    code = (
        f"async (given) => {{ const words = await import('/page/words.js'); return {expression}; }}"
    )
    return opened.page.evaluate(code, argument)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("the board cannot be read", "The board cannot be read."),
        ("starting", "Starting."),
        ("it's on", "It's on."),
        ("worker dp0 rank 1: no heartbeat", "worker dp0 rank 1: no heartbeat."),
        ("api_server dp0 rank 0: ended", "api_server dp0 rank 0: ended."),
        ("bench-1 holds it", "bench-1 holds it."),
        ("vLLM 0.9 is too old", "vLLM 0.9 is too old."),
        ("board.json is gone", "board.json is gone."),
        ("pause_budget_ms: too low", "pause_budget_ms: too low."),
        ("<script> is text.", "<script> is text."),
    ],
)
def test_a_sentence_begins_with_a_capital_unless_an_identifier_begins_it(
    opened: Tab, text: str, said: str
) -> None:
    tell(opened)
    assert words(opened, "words.sentence(given)", text) == said


@pytest.mark.parametrize(
    ("zone", "said"),
    [
        ("Asia/Tokyo", "times in UTC+9, Asia/Tokyo"),
        ("America/Caracas", "times in UTC-4, America/Caracas"),
    ],
)
def test_the_zone_of_the_times_is_named(
    browser: Browser, url_of_files: str, zone: str, said: str
) -> None:
    with tab(browser, url_of_files, timezone_id=zone) as opened:
        assert tell(opened).text("zone") == said


def test_a_time_of_another_day_tells_the_day(opened: Tab) -> None:
    tell(opened)
    clock = "words.clockTime(new Date(new Date().setHours(12, 30, 0, 0) + given * 86400e3).getTime() / 1000)"
    assert words(opened, clock, 0) == "12:30:00"
    for days in (-1, 1):
        day = words(opened, "new Date(Date.now() + given * 86400e3).getDate()", days)
        assert words(opened, clock, days).startswith(f"{day} ")
        assert words(opened, clock, days).endswith(" 12:30:00")
