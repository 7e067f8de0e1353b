"""An hour with 64 stand-in processes and 10,000 pauses, replayed: the page stays quick and small."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.embedded.engine import run_directory
from tests.page.browser import NOTICE_LONG_TASKS, Browser, tab
from tests.page.replayed_hour import PAUSES, PROCESSES, stand_in_pages
from tests.sidecar_process import wait_for
from tests.vllm.real_vllm import free_port

pytestmark = pytest.mark.xdist_group("page")

LONG_MS = 100
MAXIMUM_HEAP_BYTES = 200e6


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    log = (tmp_path_factory.mktemp("hour") / "sidecar.log").open("wb")
    repository = Path(__file__).resolve().parents[2]
    with run_directory() as run_dir, stand_in_pages(run_dir):
        command = [sys.executable, "-m", "tests.page.replayed_hour", str(port), str(run_dir)]
        environment = {"PYTHONPATH": f"{repository}:{repository / 'sidecar'}"}
        with subprocess.Popen(command, stdout=log, stderr=log, env=environment) as sidecar:
            try:
                wait_for("the sidecar with an hour behind it", lambda: is_there(address), 60)
                yield address
            finally:
                sidecar.kill()


def is_there(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/gc", timeout=10) as answer:
            return bool(json.load(answer)["coverage"]["acknowledged"] == PROCESSES)
    except OSError:
        return False


def test_an_hour_of_64_processes_is_shown_without_a_long_task_in_little_memory(
    browser: Browser, url: str
) -> None:
    with tab(browser, url) as shown:
        page = shown.page
        page.add_init_script(NOTICE_LONG_TASKS)
        shown.open()
        assert len(shown.rows("processes")) == PROCESSES
        page.click("#listed summary")
        page.click("[data-span='3600']")
        page.wait_for_timeout(1000)
        page.evaluate("window.longTasks = []")  # so far it was loading
        page.wait_for_timeout(2000)
        page.locator("#timeline .u-over").scroll_into_view_if_needed()
        box = page.locator("#timeline .u-over").bounding_box()
        assert box is not None
        for step in range(40):
            page.mouse.move(box["x"] + 10 * step, box["y"] + 100 + 5 * step)
        page.mouse.down()
        page.mouse.move(box["x"] + 700, box["y"] + 300, steps=5)
        page.mouse.up()
        shown.until("shown", "held")
        for span in ("900", "3600"):
            page.click(f"[data-span='{span}']")
            page.wait_for_timeout(200)
        page.set_viewport_size({"width": 800, "height": 900})
        page.wait_for_timeout(1000)
        tasks = page.evaluate("window.longTasks")
        heap = page.evaluate("performance.memory.usedJSHeapSize")
        print(f"tasks of 50 ms and more: {tasks}; {heap / 1e6:.0f} MB; {PAUSES} pauses")
        assert max(tasks, default=0) <= LONG_MS
        assert heap < MAXIMUM_HEAP_BYTES
