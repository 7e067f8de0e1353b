"""The demo's live view: at every width its lines end in time, with whole figures and the newest bars."""

from __future__ import annotations

import io
import re

import pytest

from gc_sidecar.embedded.live import (
    BARS,
    BARS_AT_LEAST,
    BARS_SHOWN,
    NARROWEST,
    Rung,
    Step,
    fit,
    live_line,
    rung_line,
    terminal_width,
)

STEPS = [Step(1, 0.005, 462_500), Step(2, 1.234, 1_000_000), Step(3, 0.006, 1_055_500)]
RUNGS = [Rung(0.548, STEPS[0]), Rung(1.0, Step(2, 1.234, 1_055_500))]
BLOCKS = BARS.strip()
TRAIL = "".join(BLOCKS[number % len(BLOCKS)] for number in range(BARS_SHOWN))
WIDTHS = range(NARROWEST - 1, 140)


def test_the_live_line_fits_and_ends_with_the_newest_bars() -> None:
    for width in range(NARROWEST - len("\n^C"), 140):
        line = live_line(7.0, STEPS, TRAIL, width)
        assert len(line) <= width
        bars = line[len(line.rstrip(BLOCKS)) :]
        assert len(bars) >= BARS_AT_LEAST
        assert TRAIL.endswith(bars)


def test_numbers_are_whole_or_not_there() -> None:
    for width in WIDTHS:
        numbers = re.findall(r"[\d,.]+", live_line(7.0, STEPS, TRAIL, width))
        assert set(numbers) <= {"7", "3", "6", "1234", "1,055,500"}
        assert "1,055,500" in numbers
        rung = rung_line(RUNGS, width)
        assert len(rung) <= width
        assert set(re.findall(r"[\d,.]+", rung)) <= {"2", "1,055,500", "2.28", "1000", "1234"}
        assert rung.startswith("    full collection 2:")
        assert "paused 1000 ms" in rung


def test_with_room_every_figure_is_there() -> None:
    line = live_line(7.0, STEPS, TRAIL, 120)
    for figure in ("7 s", "3 steps", "now    6 ms", "longest 1234 ms", "1,055,500 objects", TRAIL):
        assert figure in line
    rung = rung_line(RUNGS, 79)
    assert re.search(r"1,055,500 objects x2\.28  paused 1000 ms  step 1234 ms$", rung)


def test_few_bars_are_shown_as_they_are() -> None:
    assert live_line(0.2, STEPS, "▁▂", 79).endswith(" objects  ▁▂")


def test_the_last_figure_stays_however_narrow_it_is() -> None:
    assert fit([], 10) == ""
    assert rung_line(RUNGS, 10) == "    full collection 2:"


@pytest.mark.parametrize(("columns", "width"), [("60", 59), ("20", NARROWEST - 1), ("", 79)])
def test_columns_is_respected_where_no_terminal_is(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.__stdout__", io.StringIO())
    assert terminal_width() == width
