"""What is drawn over time: which colours and marks, and which stretch of time at first."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest

from tests.page.browser import Tab
from tests.page.told import operation, pause, tell, window

pytestmark = pytest.mark.xdist_group("page")

# How many pixels of the timeline have a colour of the style sheet, in the bands and below them.
PIXELS = """(name) => {
  const canvas = document.querySelector("#timeline canvas");
  const { width, height } = canvas;
  const copy = new OffscreenCanvas(width, height + 1).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  copy.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  copy.fillRect(0, height, 1, 1);
  const wanted = copy.getImageData(0, height, 1, 1).data.join();
  const { data } = copy.getImageData(0, 0, width, height);
  const found = {};
  for (let i = 0; i < data.length; i += 4) {
    if (data.slice(i, i + 4).join() !== wanted) continue;
    const row = Math.floor(i / 4 / width);
    found[row] = (found[row] || 0) + 1;
  }
  return found;
}"""


def rows_of(shown: Tab, colour: str) -> dict[int, int]:
    """How many pixels of this colour each row has that has any."""
    shown.page.wait_for_timeout(300)
    found: dict[str, int] = shown.page.evaluate(PIXELS, colour)
    return {int(row): count for row, count in found.items()}


@pytest.mark.parametrize(
    ("policy", "length_s", "is_red"),
    [
        ({"mode": "budget", "pause_budget_ms": 5.0}, 0.004, False),
        ({"mode": "budget", "pause_budget_ms": 5.0}, 0.2, True),
        ({"mode": "off"}, 0.004, True),
    ],
)
def test_under_a_budget_only_what_is_longer_is_red(
    opened: Tab, policy: dict[str, Any], length_s: float, is_red: bool
) -> None:
    # So many, for the edge of a bar may lie within a pixel.
    pauses = [pause(10 + 0.37 * index, length_s) for index in range(20)]
    shown = tell(opened, policy=policy, pauses=pauses)
    assert bool(rows_of(shown, "auto")) == is_red
    assert bool(rows_of(shown, "young")) != is_red
    is_budget = policy["mode"] == "budget"
    assert ("longer than the budget" in shown.text("legend-auto")) == is_budget
    assert ("within the budget" in shown.text("legend-young")) == is_budget


def test_windows_and_operations_can_be_told_apart_without_colour(opened: Tab) -> None:
    windows = [window("a", 50, 10, True), window("b", 35, 10, False), window("c", 20, 0, None)]
    operations = [operation("d", 55, 5), operation("e", 40, 5, "failed")]
    shown = tell(opened, windows=windows, operations=operations)
    solid, stripes, hollow = (rows_of(shown, each) for each in ("clean", "dirty", "open"))
    assert len({*solid.values()}) == 1, "a clean window is full"
    # Of another band there is the failed operation, above.
    striped = [row for row in solid if row in stripes]
    assert 0 < len(striped) < len(solid), "one that is not clean has a gap"
    assert min(striped) - min(solid) <= 1 >= max(solid) - max(striped)
    assert min(hollow.values()) < max(hollow.values()) / 10, "an open one has an edge alone"
    (band,) = (rows_of(shown, "asked"),)
    crossed = rows_of(shown, "failed")
    assert len({*band.values()}) == 1
    assert len({crossed[row] for row in band if row in crossed}) > 1, "a cross lies over it"
    legend = shown.text("legend")
    assert "open window" in legend
    assert "operation not done" in legend


def held_from(shown: Tab) -> float:
    """How long ago the view begins, by its own word."""
    shown.page.wait_for_timeout(300)
    shown.page.click("#follow")
    held = re.match(r"([\d:]+) to ([\d:]+), held", shown.until("shown", "held"))
    assert held is not None
    first, last = (datetime.strptime(each, "%H:%M:%S") for each in held.groups())
    return (last - first).total_seconds() % 86400


@pytest.mark.parametrize(("first_s", "shown_s"), [(5, 60), (300, 300), (3000, 900)])
def test_the_first_view_is_of_what_there_is_up_to_15_minutes(
    opened: Tab, first_s: float, shown_s: float
) -> None:
    shown = tell(opened, pauses=[pause(first_s, 0.1)])
    assert held_from(shown) == pytest.approx(shown_s, abs=5)
    pressed = "[...document.querySelectorAll('[data-span][aria-pressed=true]')].map((each) => each.innerText)"
    shown.page.click("#follow")
    assert shown.page.evaluate(pressed) == (["15 min"] if shown_s == 900 else [])
    shown.page.click("[data-span='900']")
    assert shown.page.evaluate(pressed) == ["15 min"]
    assert held_from(shown) == pytest.approx(900, abs=2)


def test_the_button_that_holds_the_view_says_so(opened: Tab) -> None:
    shown = tell(opened, pauses=[pause(10, 0.1)])
    assert shown.text("follow") == "Hold"
    shown.page.click("#follow")
    assert shown.text("follow") == "Follow"
