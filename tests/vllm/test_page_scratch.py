from __future__ import annotations

from tests.page.browser import chromium, tab
from tests.page.story import a_pause_appears_soon, buttons_do_what_the_api_does
from tests.vllm.test_tensor_parallel import sidecar, tp2  # noqa: F401


def test_the_page(tp2, sidecar) -> None:  # noqa: F811
    with chromium() as browser, tab(browser, sidecar.url) as shown:
        shown.open()
        print("shown after", a_pause_appears_soon(shown, tp2, sidecar))
        buttons_do_what_the_api_does(shown, tp2, sidecar)
