"""What tests of doctor have in common, in either of its halves: a pod's volume, and what was found."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@contextmanager
def memory_volume() -> Iterator[Path]:
    """A directory as a pod's memory volume with an fsGroup would be."""
    assert os.access("/dev/shm", os.W_OK), "these tests need a tmpfs on /dev/shm"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        os.chmod(directory, 0o2770)
        yield Path(directory)


@dataclass
class Diagnosis:
    """The JSON that doctor printed, its exit code, and what it said on standard error."""

    document: dict[str, Any]
    code: int
    error: str = ""

    @property
    def bad(self) -> list[dict[str, str]]:
        return [finding for finding in self.document["findings"] if finding["level"] != "ok"]

    def find(self, check: str, level: str) -> dict[str, str]:
        """The first finding of this check at this level."""
        found: list[dict[str, str]] = [
            finding
            for finding in self.document["findings"]
            if (finding["check"], finding["level"]) == (check, level)
        ]
        assert found, f"{check} {level} is not among {json.dumps(self.bad, indent=1)}"
        return found[0]

    def assert_sound(self) -> None:
        assert self.bad == []
        assert (self.document["worst"], self.code) == ("ok", 0)
