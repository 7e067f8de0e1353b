"""Files of a sweep: whoever reads one sees all of it or the one before, and whatever fails names the file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError inside speaks of `path`: that of a full disk names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A file that takes the place of `path` when all of it is written, and else leaves `path` as it is."""
    # Beside it, for only inside one file system is it replaced at once.
    temporary = path.with_name(f".{path.name}.new")
    try:
        with naming(path):
            with temporary.open("w", encoding="utf-8", newline="") as out:
                yield out
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
