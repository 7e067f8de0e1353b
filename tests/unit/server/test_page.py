"""The page's files: what is served to whom, that nothing else can be read, and that they need nobody else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePath

import pytest

from gc_sidecar.server.page import CONTENT_SECURITY_POLICY, INDEX, page_files
from tests.unit.server.conftest import StartSidecar
from tests.unit.server.test_requests import assert_problem

pytestmark = pytest.mark.anyio

REPOSITORY = Path(__file__).resolve().parents[3]
SOURCES = REPOSITORY / "sidecar" / "gc_sidecar" / "page"
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
# How a browser follows a link on another site, into a tab.
LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
MAXIMUM_BYTES = 150_000


def test_all_of_it_is_small() -> None:
    assert sum(path.stat().st_size for path in SOURCES.iterdir()) < MAXIMUM_BYTES


def test_every_file_is_served_and_packed(tmp_path: Path) -> None:
    names = {path.name for path in SOURCES.iterdir()}
    assert set(page_files()) == names
    # From a copy, for it is built in place.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    shutil.copytree(
        REPOSITORY / "sidecar", source / "sidecar", ignore=shutil.ignore_patterns("*.egg-info")
    )
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*pip, str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = [PurePath(name) for name in zipfile.ZipFile(wheel).namelist()]
    folder = PurePath("gc_sidecar/page")
    assert {path.name for path in inside if path.parent == folder} == names


def test_it_needs_nobody_else() -> None:
    for path in SOURCES.iterdir():
        text = path.read_text()
        urls = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", text)
        # uPlot says in a comment where it comes from.
        assert set(urls) <= {"https://github.com/leeoniya/uPlot"}, path.name
        if path.suffix == ".html":
            assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\ssrc=)", text)
        if path.suffix == ".js" and not path.name.startswith("uPlot"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text
            )


def test_whatever_it_asks_for_is_there() -> None:
    index = (SOURCES / INDEX).read_text()
    asked = set(re.findall(r"(?:href|src)=\"page/([^\"]+)\"", index))
    for path in SOURCES.glob("*.js"):
        asked |= set(re.findall(r"(?:from|import) \"\./([^\"]+)\"", path.read_text()))
    others = {INDEX, "uPlot.LICENSE"}
    assert asked == {path.name for path in SOURCES.iterdir()} - others


async def test_browsers_get_the_page_and_everybody_else_the_routes(
    start_sidecar: StartSidecar,
) -> None:
    sidecar = await start_sidecar()
    answer = await sidecar.client.get("/", headers=HTML)
    assert answer.text.startswith("<!doctype html>")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    for accept in ("*/*", "application/json", ""):
        answer = await sidecar.client.get("/", headers={"Accept": accept})
        assert "GET /gc/events" in answer.json()["routes"]
        assert answer.headers["vary"] == "Accept"


async def test_files_are_asked_for_once(start_sidecar: StartSidecar) -> None:
    sidecar = await start_sidecar()
    for name in page_files():
        if name == INDEX:
            continue
        answer = await sidecar.client.get(f"/page/{name}")
        assert answer.content == (SOURCES / name).read_bytes()
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        known = {"If-None-Match": f'"other", W/{answer.headers["etag"]}'}
        again = await sidecar.client.get(f"/page/{name}", headers=known)
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    ["/page/", "/page/index.html", "/page/nothing.js", "/page/../server/app.py", "/page/%2e%2e/server/app.py",
     "/page/..%2fserver%2fapp.py", "/page//etc/passwd", "/page/page.js/", "/page/__init__.py", "/page/page.js%00"],
)  # fmt: skip
async def test_nothing_else_can_be_read(start_sidecar: StartSidecar, path: str) -> None:
    sidecar = await start_sidecar()
    assert_problem(await sidecar.client.get(path), 404, "not_found")


async def test_the_page_needs_no_token_and_everything_that_it_shows_does(
    start_sidecar: StartSidecar, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret-enough")
    sidecar = await start_sidecar(token_file=str(token))
    assert (await sidecar.client.get("/", headers=HTML)).text.startswith("<!doctype html>")
    assert (await sidecar.client.get("/page/page.js")).status_code == 200
    for path in ("/", "/gc", "/gc/events", "/gc/operations", "/gc/operations/x", "/openapi.json"):
        assert_problem(await sidecar.client.get(path), 401, "token_required")
    for path in ("/gc", "/gc/events", "/gc/operations", "/openapi.json", "/page"):
        answer = await sidecar.client.get(path, headers=HTML)
        assert_problem(answer, 401, "token_required")
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        for path in ("/", "/page/page.js"):
            answer = await sidecar.client.request(method, path, headers=HTML)
            assert_problem(answer, 401, "token_required")
    everything = "".join(file.content.decode() for file in page_files().values())
    assert "secret-enough" not in everything


async def test_a_link_on_another_site_leads_to_the_page_and_nowhere_else(
    start_sidecar: StartSidecar,
) -> None:
    sidecar = await start_sidecar()
    client = sidecar.client
    assert (await client.get("/", headers={**HTML, **LINK})).status_code == 200
    for path in ("/gc", "/gc/events", "/metrics", "/openapi.json"):
        assert_problem(await client.get(path, headers={**HTML, **LINK}), 403, "cross_origin")
    answer = await client.post("/gc/restore", headers={**HTML, **LINK})
    assert_problem(answer, 403, "cross_origin")
    answer = await client.get("/", headers=LINK)
    assert_problem(answer, 403, "cross_origin")
    for change in (
        {"Sec-Fetch-Dest": "iframe"},
        {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"},
        {"Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"},
    ):
        for path in ("/", "/page/page.js"):
            answer = await client.get(path, headers={**HTML, **LINK, **change})
            assert_problem(answer, 403, "cross_origin")
    answer = await client.get("/", headers={**HTML, **LINK, "Host": "evil.example"})
    assert_problem(answer, 403, "host_not_allowed")
