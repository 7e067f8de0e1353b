"""What the page has to do on any engine: on the embedded one here, and on a real vLLM in tests/vllm."""

from __future__ import annotations

import re
import time

from tests.page.browser import Tab
from tests.sidecar_process import SidecarProcess
from tests.vllm.scene import HELD_OFF, Scene, pids_of

COLLECT = "import gc; result = gc.collect()"
# From its end in the process until a person can see it.
SOON_S = 2.0
LAST_PAUSE, PID = 3, 7
# How many pauses the page lists at most.
LISTED = 20


def a_pause_appears_soon(tab: Tab, running: Scene, sidecar: SidecarProcess) -> float:
    """A collection that some code asks for is on the page soon; how soon."""
    pids = pids_of(sidecar.status())
    name = next(each for each in pids if each.startswith("worker"))
    tab.page.click("#listed summary")
    shown = "document.querySelectorAll('#listed tbody tr').length"
    before = tab.page.evaluate(shown)
    pid = str(pids[name])
    last = next(row[LAST_PAUSE] for row in tab.rows("processes") if row[PID] == pid)
    running.probe.run(COLLECT, {name: pids[name]})
    ended = time.monotonic()
    tab.page.wait_for_function(
        "([pid, last]) => [...document.querySelectorAll('#processes > tbody > tr')].some((row) =>"
        f" row.cells[{PID}].innerText.trim() === pid && row.cells[{LAST_PAUSE}].innerText.trim() !== last)",
        arg=[pid, last],
        polling=20,
    )
    took_s = time.monotonic() - ended
    assert took_s < SOON_S
    # The list is of the longest: on an engine with a past it is full already.
    tab.page.wait_for_function(f"(before) => {shown} > before || before >= {LISTED}", arg=before)
    return took_s


def buttons_do_what_the_api_does(tab: Tab, running: Scene, sidecar: SidecarProcess) -> None:
    """Freeze, maintain and restore by button: the API tells it, and the engine's own GC shows it."""
    pids = pids_of(sidecar.status())
    count = len(pids)
    found = running.gc_state(pids)
    assert tab.text("answer") == "No."

    tab.press("freeze", owner="page-test", lease="30")
    assert f"full collection in {count} processes" in tab.text("dialog-cost")
    tab.confirm()
    assert f"Freeze entered in {count} of {count} processes, in " in tab.text("outcome")
    policy = sidecar.status()["policy"]
    assert (policy["mode"], policy["owner"]) == ("freeze", "page-test")
    assert all(state["threshold"][2] == HELD_OFF for state in running.gc_state(pids).values())
    sentence = tab.until("why", "No automatic full collection runs")
    assert tab.text("answer") == "Yes."
    assert f"freeze by page-test, in {count} of {count} processes, since " in sentence
    assert tab.text("fact-policy") == "freeze"
    assert re.search(r"\((29 min \d+ s|30 min 0 s) left\)", tab.text("fact-until"))

    tab.press("maintain")
    cost = tab.text("dialog-cost")
    assert "about" in cost
    assert "by the last one" in cost
    tab.confirm()
    assert f"Maintenance done in {count} of {count} processes, in " in tab.text("outcome")
    assert sidecar.status()["policy"]["generation"] == policy["generation"]

    tab.press("restore")
    tab.confirm()
    assert sidecar.status()["policy"]["mode"] == "off"
    assert running.gc_state(pids) == found
    tab.until("answer", "No.")
    kinds = [each["kind"] for each in sidecar.get("/gc/operations")[1]["operations"][:3]]
    assert kinds == ["restore", "maintain", "freeze"]
    assert [row[1] for row in tab.rows("operations")[:3]] == kinds
    tab.page.click("#operations tbody tr:first-child button")
    tab.page.wait_for_selector("#operations td.inner tbody tr")
    results = tab.page.locator("#operations td.inner tbody tr").all_inner_texts()
    assert len(results) == count
    assert all("ok" in line for line in results)
