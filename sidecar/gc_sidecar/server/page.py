"""The page for people: a few files of the package `gc_sidecar.page`, read at the start.

They hold no secret and nothing of the engine, which the page asks the API for like anybody else.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from gc_sidecar.server.problems import Problem

INDEX = "index.html"
PREFIX = "/page/"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
MEDIA_TYPES = tuple(dict.fromkeys(each.partition(";")[0] for each in _TYPES.values()))
# Of the page and its files. Whatever slips into them, it runs no foreign script and talks to nobody else.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class File:
    """One of them, as it is sent."""

    content: bytes
    media_type: str
    etag: str


@functools.cache
def page_files() -> Mapping[str, File]:
    """All files by name. Nothing else can be asked for."""
    found = {}
    for each in files("gc_sidecar").joinpath("page").iterdir():
        suffix = PurePath(each.name).suffix
        if suffix in _TYPES:
            content = each.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            found[each.name] = File(content, _TYPES[suffix], etag)
    return found


def file_names() -> list[str]:
    """Those that can be asked for by name."""
    return sorted(page_files().keys() - {INDEX})


def is_wanted(headers: Headers) -> bool:
    """Whether whoever asks for `/` shows pages: curl and scripts get the list of routes."""
    return "text/html" in headers.get("accept", "")


def is_asked_for(scope: Scope, headers: Headers) -> bool:
    """Whether a request reads a file of the page, and nothing else."""
    path = scope["path"]
    is_page = path.startswith(PREFIX) or (path == "/" and is_wanted(headers))
    return is_page and scope["method"] in ("GET", "HEAD")


def answer(name: str, headers: Headers) -> Response:
    """A file, or that the caller has it already. Raises Problem."""
    file = page_files().get(name)
    if file is None:
        raise Problem("not_found", f"there is no route {PREFIX + name[:200]!r}")
    sent = {
        "ETag": file.etag,
        "Cache-Control": "no-cache",
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "Vary": "Accept",
    }
    known = [
        each.strip().removeprefix("W/") for each in headers.get("if-none-match", "").split(",")
    ]
    if file.etag in known:
        return Response(status_code=304, headers=sent)
    return Response(file.content, headers=sent, media_type=file.media_type)
