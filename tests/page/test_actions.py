"""What a dialog says that an action costs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.page.browser import Tab
from tests.page.told import pause, tell

pytestmark = pytest.mark.xdist_group("page")


@pytest.mark.parametrize(
    ("expected_s", "pauses", "said"),
    [
        (3.98, [pause(60, 3.22)], "about 3.98 s by the last one and how the heap has grown since."),
        (None, [pause(60, 3.22)], "about 3.22 s by the last one."),
        (None, [], "for how long is not known yet."),
    ],
)
def test_a_dialog_says_how_long_it_takes_and_by_what_that_is_known(
    opened: Tab, expected_s: float | None, pauses: list[Any], said: str
) -> None:
    shown = tell(opened, changes={"expected_pause_s": expected_s}, pauses=pauses)
    shown.press("maintain")
    assert said in shown.text("dialog-cost")
