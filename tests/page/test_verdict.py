"""Whether it is safe to measure: the page says what the sidecar answers, for as long as it hears from it."""

from __future__ import annotations

import pytest

from tests.page.browser import Tab
from tests.page.told import tell

pytestmark = pytest.mark.xdist_group("page")

SAFE = {
    "yes": ("✓", {"answer": "yes", "word": "Yes.", "why": "No automatic full collection runs."}),
    "no": ("✗", {"answer": "no", "word": "Not for long.", "why": "The policy ends in 20 s."}),
    "unknown": ("?", {"answer": "unknown", "word": "Not known.", "why": "No page can be read."}),
}


def said_by(opened: Tab) -> str:
    """The mark of the page's answer, and its words."""
    return f"{opened.page.title()[0]} {opened.text('answer')} {opened.text('why')}"


@pytest.mark.parametrize("answer", SAFE)
def test_it_says_what_the_sidecar_answers_and_which_policy_is_in_force(
    opened: Tab, answer: str
) -> None:
    mark, told = SAFE[answer]
    said = said_by(tell(opened, changes={"safe_to_measure": told}))
    assert said.startswith(
        f"{mark} {told['word']} {told['why']} In force: freeze by bench-1, in 1 of 1"
    )


def test_yes_ends_with_the_connection(opened: Tab) -> None:
    assert said_by(tell(opened)).startswith("✓")
    opened.until("answer", "Not known.")
    assert opened.rows("processes")[0][2] == "\u2013", "whether it collects now is not known"
