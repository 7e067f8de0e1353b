"""One browser for all tests of the page, and one sidecar for those that need the page's files alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.page.browser import Browser, Tab, chromium, tab
from tests.sidecar_process import SidecarProcess


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def url_of_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("files")
    with SidecarProcess(run_dir=directory, log_path=directory / "log") as started:
        yield started.url


@pytest.fixture
def opened(browser: Browser, url_of_files: str) -> Iterator[Tab]:
    """A tab that shows nothing yet."""
    with tab(browser, url_of_files) as made:
        yield made
