"""The page in a real Chromium, against a real sidecar and the embedded engine."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.embedded.engine import scene
from tests.forked_sidecar import ForkedSidecar
from tests.page.browser import PHONE, Browser, Tab, tab
from tests.page.story import LAST_PAUSE, a_pause_appears_soon, buttons_do_what_the_api_does
from tests.sidecar_process import wait_for
from tests.vllm.scene import Scene, pids_of

# One browser and one engine for all of them.
pytestmark = pytest.mark.xdist_group("page")

EVERYONE = 4
TOKEN = "correct-horse-battery-staple"
VIEWS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": PHONE, "is_mobile": True, "has_touch": True},
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """An engine that every test leaves in normal GC."""
    flags = ("--workers=2", "--heap-objects=60000")
    with scene(tmp_path_factory.mktemp("page"), *flags) as started:
        yield started


@pytest.fixture
def sidecar(running: Scene) -> Iterator[ForkedSidecar]:
    with running.sidecar("page") as started:
        started.wait_for_coverage(EVERYONE)
        wait_for("a transport", lambda: started.status()["transport"] == "plugin")
        yield started
        assert started.post("/gc/restore", {"force": True})[0] == 200
        assert "internal_error" not in started.log_text()
        assert '"live_failed"' not in started.log_text()


@pytest.fixture
def shown(browser: Browser, sidecar: ForkedSidecar) -> Iterator[Tab]:
    with tab(browser, sidecar.url) as opened:
        yield opened.open()


def test_a_pause_appears_within_two_seconds(
    shown: Tab, running: Scene, sidecar: ForkedSidecar
) -> None:
    took_s = a_pause_appears_soon(shown, running, sidecar)
    print(f"a pause was shown {took_s:.2f} s after its end")


def test_buttons_do_what_the_api_does(shown: Tab, running: Scene, sidecar: ForkedSidecar) -> None:
    buttons_do_what_the_api_does(shown, running, sidecar)


def test_budget_by_button(shown: Tab, sidecar: ForkedSidecar) -> None:
    shown.press("budget", budget="7")
    shown.confirm()
    policy = sidecar.status()["policy"]
    assert (policy["mode"], policy["pause_budget_ms"]) == ("budget", 7.0)
    assert "pauses of about 7.00 ms" in shown.until("why", "7.00 ms by anonymous")
    assert shown.text("fact-policy") == "budget of 7.00 ms"
    assert "Budget entered in 4 of 4 processes, in " in shown.text("outcome")
    shown.press("budget")
    assert "no collection runs" in shown.text("dialog-cost")
    shown.confirm()
    assert "Lease renewed in 4 of 4 processes, in " in shown.text("outcome")


def test_a_maintenance_gives_memory_back_to_the_system_where_that_is_ticked(
    shown: Tab, sidecar: ForkedSidecar
) -> None:
    assert "seldom returns it to the system" in shown.page.inner_text("section:has(#memory)")
    asked: list[Any] = []
    shown.page.on(
        "request", lambda request: request.method == "POST" and asked.append(request.post_data_json)
    )
    for is_ticked in (False, True, False):
        shown.press("maintain")
        assert not shown.page.is_checked("#field-trim"), "it is never ticked by itself"
        shown.page.set_checked("#field-trim", is_ticked)
        shown.confirm()
        assert asked.pop()["trim"] is is_ticked
    shown.press("freeze")
    assert shown.page.is_hidden("#field-trim")


def test_what_is_refused_is_said_with_what_to_do(shown: Tab, sidecar: ForkedSidecar) -> None:
    assert sidecar.post("/gc/freeze", {"owner": "bench-1"})[0] == 200
    code, problem = sidecar.post("/gc/restore")
    assert (code, problem["code"]) == (409, "owned_by_other")
    shown.until("fact-owner", "bench-1")
    shown.press("restore")
    assert "belongs to bench-1" in shown.text("dialog-warning")
    said = shown.refused()
    assert problem["title"] in said
    assert problem["detail"][1:] in said
    assert problem["remedy"][1:] in said
    assert sidecar.status()["policy"]["mode"] == "freeze", "nothing was changed"
    shown.page.check("#field-force")
    shown.confirm()
    assert sidecar.status()["policy"]["mode"] == "off"
    # Sent again as it was, after whoever asked got no answer: the same operation.
    operations = sidecar.get("/gc/operations")[1]["operations"]
    assert [each["kind"] for each in operations] == ["restore", "freeze"]


def test_text_of_the_engine_and_of_others_is_text(shown: Tab, sidecar: ForkedSidecar) -> None:
    owner = "<img src=x onerror=alert(1)>"
    window = {"window_id": "w1", "name": "<script>alert(2)</script>"}
    assert sidecar.post("/gc/freeze", {"owner": owner})[0] == 200
    assert sidecar.post("/gc/windows", window)[0] == 201
    shown.until("fact-owner", owner)
    shown.until("windows", window["name"])
    assert (
        shown.page.evaluate(
            "document.images.length + document.querySelectorAll('main script').length"
        )
        == 0
    )


def test_windows_are_judged_where_they_are_shown(shown: Tab, sidecar: ForkedSidecar) -> None:
    assert sidecar.post("/gc/windows", {"window_id": "w2", "max_stall_share": 1})[0] == 201
    shown.until("windows", "w2")
    assert shown.rows("windows")[0][2] == "open"
    shown.press("maintain")
    assert "window w2 is open" in shown.text("dialog-warning")
    shown.page.click("#dialog-cancel")
    sidecar.post("/gc/freeze")
    assert sidecar.post("/gc/windows/w2/close")[0] == 200
    shown.until("windows", "policy_changed")
    assert shown.rows("windows")[0][2] == "not clean"


def test_it_stays_right_through_a_reload_and_a_restart_of_the_sidecar(
    shown: Tab, running: Scene, sidecar: ForkedSidecar
) -> None:
    sidecar.post("/gc/freeze", {"owner": "bench-2"})
    shown.until("why", "freeze by bench-2")
    before = shown.rows("processes")
    shown.page.reload()
    shown.until("why", "freeze by bench-2")
    assert [row[0] for row in shown.rows("processes")] == [row[0] for row in before]
    assert [row[1] for row in shown.rows("operations")] == ["freeze"]

    sidecar.__exit__(None, None, None)
    said = shown.until("verdict", "Not connected to the sidecar since")
    assert said.startswith("Not known.")
    assert "not connected since" in shown.text("link")
    assert shown.page.is_disabled("[data-action=freeze]")
    with sidecar:
        shown.until_live()
        shown.until("why", "freeze by bench-2")
        assert shown.rows("operations") == [], "this one has not been asked for anything"
        assert shown.page.is_enabled("[data-action=freeze]")
        sidecar.wait_for_coverage(EVERYONE)
        told = [row[LAST_PAUSE] for row in shown.rows("processes")]
        assert any(each.endswith("s") for each in told), "of before it was started, by the pages"
        assert sidecar.post("/gc/restore", {"force": True})[0] == 200
    sidecar.__enter__()


def test_it_stays_right_through_a_restart_of_the_engine(browser: Browser, tmp_path: Path) -> None:
    with (
        scene(tmp_path, "--workers=1", "--heap-objects=20000", probe=False) as running,
        running.sidecar("restart") as sidecar,
        tab(browser, sidecar.url) as shown,
    ):
        sidecar.wait_for_coverage(3)
        shown.open()
        before = set(pids_of(sidecar.status()).values())
        running.engine.__exit__(None, None, None)
        shown.page.wait_for_selector("#reasons li")
        assert "start" in shown.text("reasons")
        with running.engine:
            sidecar.wait_for_coverage(3)
            shown.page.wait_for_function("() => document.getElementById('reasons').hidden")
            after = pids_of(sidecar.status())
            assert not before & set(after.values())
            assert {row[-1] for row in shown.rows("processes")} == {
                str(pid) for pid in after.values()
            }
            sidecar.post("/gc/freeze")
            shown.until("why", "in 3 of 3 processes")


def test_the_token_is_asked_for_and_stays_in_the_tab(
    browser: Browser, running: Scene, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)

    class WithToken(ForkedSidecar):
        def _answers(self) -> bool:
            try:
                return self.get("/healthz", parse=False)[0] == 401
            except OSError:
                return False

    with (
        WithToken(
            run_dir=running.run_dir,
            extra_args=[f"--token-file={token}"],
            log_path=tmp_path / "sidecar.log",
        ) as sidecar,
        tab(browser, sidecar.url) as shown,
    ):
        page = shown.page
        page.goto(f"{shown.url}/")
        page.wait_for_selector("#token-field", state="visible")
        assert page.evaluate("document.activeElement.id") == "token-field"
        assert "asks for a token" in shown.text("verdict")
        page.fill("#token-field", "wrong")
        page.keyboard.press("Enter")
        shown.until("token-text", "does not take this token")
        page.fill("#token-field", TOKEN)
        page.keyboard.press("Enter")
        shown.until_live()
        assert page.is_hidden("#token")
        page.reload()
        shown.until_live()
        shown.press("freeze")
        shown.confirm()
        shown.until("fact-policy", "freeze")
        shown.press("restore")
        shown.confirm()
        kept = page.evaluate(
            "[document.cookie, localStorage.length, Object.values(sessionStorage)]"
        )
        assert kept[:2] == ["", 0]
        assert TOKEN in kept[2]
        assert not [url for url in shown.requests if TOKEN in urllib.parse.unquote(url)]
        assert TOKEN not in page.content()
        assert TOKEN not in sidecar.log_text()
        # Another tab is another session.
        with tab(browser, sidecar.url) as other:
            other.page.goto(f"{other.url}/")
            other.page.wait_for_selector("#token-field", state="visible")
        token.write_text("another-token")
        page.reload()
        page.wait_for_selector("#token-field", state="visible")


def test_a_page_may_be_read_only(browser: Browser, running: Scene) -> None:
    with running.sidecar("read-only", "--read-only-page") as sidecar:
        with tab(browser, sidecar.url) as shown:
            shown.open()
            assert shown.page.is_hidden("#actions")
            assert "read-only" in shown.text("read-only")
        assert sidecar.post("/gc/restore")[0] == 200, "the API is as it was"


@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_serious(browser: Browser, sidecar: ForkedSidecar, view: str) -> None:
    sidecar.post("/gc/freeze", {"owner": "bench-1"})
    sidecar.post("/gc/windows", {"window_id": f"axe-{view[-1]}"})
    with tab(browser, sidecar.url, **VIEWS[view]) as shown:
        shown.open()
        shown.until("why", "bench-1")
        width = shown.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert width <= 0, "it is no wider than the screen"
        shown.page.click("#operations button")
        shown.page.wait_for_selector("#operations td.inner tbody tr")
        shown.page.click("#listed summary")
        assert not shown.violations()
        shown.press("restore")
        shown.refused()
        assert not shown.violations("#dialog")


# What somebody sees at the middle of each cell's own words, where that is not the cell.
COVERED = """(cells) => cells.filter((cell) => {
  cell.scrollIntoView({ block: "center" });
  const words = document.createRange();
  words.selectNodeContents(cell);
  const [box] = words.getClientRects();
  if (!box) return false;
  const seen = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
  return box.right > innerWidth || !(cell.contains(seen) || seen.contains(cell));
}).map((cell) => cell.textContent)"""
TABLES = ("processes", "operations", "windows")


@pytest.mark.parametrize("width", [360, 390])
def test_on_a_phone_every_row_is_a_card_of_which_nothing_is_hidden(
    browser: Browser, sidecar: ForkedSidecar, width: int
) -> None:
    sidecar.post("/gc/windows", {"window_id": f"phone-{width}"})
    sidecar.post("/gc/freeze", {"owner": "bench-1"})
    sidecar.post(f"/gc/windows/phone-{width}/close")
    phone: dict[str, Any] = {"viewport": {"width": width, "height": 844}, "is_mobile": True}
    with tab(browser, sidecar.url, **phone) as shown:
        shown.open()
        shown.until("windows", "policy_changed")
        page = shown.page
        page.click("#operations button")
        page.wait_for_selector("#operations td.inner tbody tr")
        page.click("#listed summary")
        for name in TABLES:
            box = page.locator(f".scroll:has(> #{name})")
            assert box.evaluate("(box) => box.scrollWidth <= box.clientWidth"), name
            cells = page.locator(f"#{name} tbody tr:not(thead tr) > *")
            assert not cells.evaluate_all(COVERED), name
        inner = page.locator("#operations td.inner tbody :is(td, th)")
        assert inner.count() == 5 * EVERYONE
        labels = (
            "(row) => [...row.querySelectorAll('[data-label]')].map((each) => each.dataset.label)"
        )
        told = page.locator("#windows > tbody > tr").first.evaluate(labels)
        assert told == ["opened", "window", "length", "why"]
        # A table, too, for those who hear it.
        tree = page.locator("#operations").aria_snapshot()
        assert 'columnheader "Done by"' in tree
        assert 'rowheader "worker 0' in tree


def test_nothing_moves_where_the_sentence_wraps_or_an_outcome_comes(shown: Tab) -> None:
    below = "document.getElementById('processes-title').getBoundingClientRect().top"
    tops = set()
    for why in ("Short.", "As long as two lines are. " * 8):
        for outcome in ("", "Freeze entered in 4 of 4 processes, in 1.00 s."):
            tops.add(
                shown.page.evaluate(
                    f"([why, outcome]) => {{ document.getElementById('why').textContent = why;"
                    f" document.getElementById('outcome').textContent = outcome; return {below}; }}",
                    [why, outcome],
                )
            )
    assert len(tops) == 1


def test_the_keyboard_reaches_everything(shown: Tab) -> None:
    page = shown.page
    reached: list[str] = []
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "(() => { const e = document.activeElement; return e.dataset.tip || e.dataset.action || e.id; })()"
            )
        )
        if reached[-1] == "coverage":
            assert "proven to be in force" in shown.text("tip")
            page.keyboard.press("Escape")
            assert page.is_hidden("#tip")
    assert {"policy", "coverage", "freeze", "restore", "longest", "timeline", "auto"} <= {*reached}
    page.focus("#timeline")
    page.keyboard.press("+")
    held = shown.until("shown", "held")
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(
        "(held) => document.getElementById('shown').textContent !== held", arg=held
    )
    page.keyboard.press("0")
    assert shown.text("shown") == ""


def test_the_mouse_zooms_and_explains(shown: Tab, running: Scene, sidecar: ForkedSidecar) -> None:
    page = shown.page
    shown.press("maintain")
    shown.confirm()
    page.click("[data-span='300']")
    page.wait_for_timeout(1200)
    page.locator("#timeline .u-over").scroll_into_view_if_needed()
    box = page.locator("#timeline .u-over").bounding_box()
    assert box is not None
    # The maintenance is at the right edge, in every lane.
    right, middle = box["x"] + box["width"], box["y"] + box["height"] - 20
    said = ""
    for step in range(60):
        page.mouse.move(right - step, middle)
        if page.is_visible("#tip"):
            said = shown.text("tip")
            if "maintain" in said:
                break
    assert "worker 1 stood still for" in said
    assert "asked for by maintain" in said
    page.mouse.move(right - 200, middle)
    page.mouse.down()
    page.mouse.move(right - 20, middle, steps=4)
    page.mouse.up()
    shown.until("shown", "held")
    page.dblclick("#timeline .u-over")
    page.wait_for_function("() => document.getElementById('shown').textContent === ''")
    page.click("#follow")
    shown.until("shown", "held")
    assert shown.text("follow") == "Follow"
