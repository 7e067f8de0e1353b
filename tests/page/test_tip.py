"""Explanations: everybody can have them, and none hides what it explains."""

from __future__ import annotations

from typing import Any

import pytest

from tests.page.browser import PHONE, Browser, tab
from tests.page.told import pause, tell

pytestmark = pytest.mark.xdist_group("page")

LOW: dict[str, Any] = {"viewport": {"width": 1000, "height": 420}}
VIEWS: dict[str, dict[str, Any]] = {
    "low": LOW, "wide": {"viewport": {"width": 1400, "height": 1000}}, "phone": {"viewport": PHONE},
}  # fmt: skip
# What the word in focus explains, as far as the explanation lies over it.
COVERED = """() => {
  const button = document.activeElement;
  const tip = document.getElementById("tip").getBoundingClientRect();
  const head = button.closest("#processes th");
  const isCard = head && innerWidth < 640;
  const column = head && !isCard ? `#processes tbody tr > :nth-child(${head.cellIndex + 1})` : "#none";
  const explained = [...document.querySelectorAll(column)];
  if (button.closest("dt")) explained.push(button.closest("div").querySelector("dd"));
  return [button, ...explained].filter((each) => {
    const box = each.getBoundingClientRect();
    return box.left < tip.right && tip.left < box.right && box.top < tip.bottom && tip.top < box.bottom;
  }).map((each) => each.textContent);
}"""


@pytest.mark.parametrize("view", VIEWS)
def test_what_has_the_focus_is_explained_though_the_focus_scrolls_the_page_and_stays_uncovered(
    browser: Browser, url_of_files: str, view: str
) -> None:
    with tab(browser, url_of_files, **VIEWS[view]) as opened:
        page = tell(opened, pauses=[pause(10, 0.1)]).page
        words = page.locator("[data-tip]:visible").count()
        explained = 0
        for key in ["Tab"] * 60 + ["Shift+Tab"] * 60:
            page.keyboard.press(key)
            if not page.evaluate("document.activeElement.matches('[data-tip]')"):
                continue
            page.wait_for_timeout(50)
            explained += 1
            said = page.evaluate("document.activeElement.dataset.tip")
            assert page.is_visible("#tip"), said
            assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"
            assert not page.evaluate(COVERED), said
        assert explained >= 2 * words - 2


def test_an_explanation_follows_its_word_and_escape_ends_it(
    browser: Browser, url_of_files: str
) -> None:
    with tab(browser, url_of_files, **LOW) as opened:
        page = tell(opened).page
        page.focus("[data-tip=coverage]")
        distance = """() => document.activeElement.getBoundingClientRect().top
          - document.getElementById("tip").getBoundingClientRect().top"""
        before = page.evaluate(distance)
        page.evaluate("scrollBy(0, 20)")
        page.wait_for_timeout(100)
        assert page.evaluate(distance) == pytest.approx(before, abs=1)
        page.keyboard.press("Escape")
        page.evaluate("scrollBy(0, -20)")
        page.wait_for_timeout(100)
        assert page.is_hidden("#tip")
