"""A real Chromium, and one tab of it that notices what a page must never do."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from tests.leaving_out import leave_out

try:
    from playwright.sync_api import Browser as Browser
    from playwright.sync_api import ConsoleMessage, Page, Request, sync_playwright
except ImportError:
    leave_out("playwright is not installed (pip install -e '.[dev]')")

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--enable-precise-memory-info",
)  # fmt: skip
PATIENCE_MS = 20_000
PHONE = {"width": 360, "height": 780}
SERIOUS = ("serious", "critical")
NOTICE_LONG_TASKS = """
window.longTasks = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.longTasks.push(Math.round(entry.duration));
}).observe({ type: "longtask" });
"""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser that talks to nobody of its own accord."""
    path = shutil.which("chromium")
    if path is None:
        leave_out("there is no Chromium (apt-get install chromium fonts-dejavu-core)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """One tab that shows the page of a sidecar."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", self._note_console)
        page.on("pageerror", lambda error: self.errors.append(f"{error}\n{error.stack}"))
        page.on("request", self._note_request)

    def _note_console(self, message: ConsoleMessage) -> None:
        # What the browser itself says of an answer that is an error, or of a sidecar that is away.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load"):
            self.errors.append(f"{message.text} ({message.location})")

    def _note_request(self, request: Request) -> None:
        self.requests.append(request.url)
        if not request.url.startswith((f"{self.url}/", "data:")):
            self.foreign.append(request.url)

    def open(self) -> Tab:
        """Go there, and wait until it is live."""
        self.page.goto(f"{self.url}/")
        self.until_live()
        return self

    def until_live(self) -> None:
        """Wait until what it shows is of now."""
        self.until("link", "live")

    def until(self, name: str, part: str) -> str:
        """Wait until an element's text has this part; the whole of it."""
        self.page.wait_for_function(
            "([name, part]) => document.getElementById(name).textContent.includes(part)", arg=[name, part]
        )  # fmt: skip
        return self.text(name)

    def text(self, name: str) -> str:
        """What an element says."""
        return self.page.locator(f"#{name}").inner_text()

    def rows(self, table: str) -> list[list[str]]:
        """The cells of a table's body."""
        found: list[list[str]] = self.page.evaluate(
            "(id) => [...document.querySelectorAll(`#${id} > tbody > tr:not([hidden])`)].map("
            "(row) => [...row.cells].map((cell) => cell.innerText.trim()))",
            table,
        )
        return found

    def press(self, action: str, **fields: str) -> None:
        """Open an action's dialog, and fill in fields of it."""
        self.page.click(f"[data-action={action}]")
        for name, value in fields.items():
            self.page.fill(f"#field-{name}", value)

    def confirm(self) -> None:
        """Do what the dialog says, and wait until it is done."""
        self.page.click("#dialog-go")
        self.page.wait_for_selector("#dialog", state="hidden")

    def refused(self) -> str:
        """Ask for what the dialog says, which is refused; what it says then."""
        self.page.click("#dialog-go")
        self.page.wait_for_selector("#dialog-problem p")
        return self.text("dialog-problem")

    def violations(self, within: str = "html") -> list[Any]:
        """What axe-core finds that is serious."""
        axe = files("axe_playwright_python").joinpath("axe.min.js").read_text()
        self.page.evaluate(axe)
        results = self.page.evaluate("(within) => axe.run(within)", within)
        return [
            (each["id"], [node["html"] for node in each["nodes"]])
            for each in results["violations"]
            if each["impact"] in SERIOUS
        ]

    def assert_quiet(self) -> None:
        """No error, and nobody else was asked for anything."""
        assert not self.errors
        assert not self.foreign


@contextlib.contextmanager
def tab(browser: Browser, url: str, **options: Any) -> Iterator[Tab]:
    """A tab with a session of its own, which must have been quiet in the end."""
    context = browser.new_context(**options)
    try:
        opened = Tab(context.new_page(), url)
        yield opened
        opened.assert_quiet()
    finally:
        context.close()
