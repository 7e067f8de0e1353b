"""`gc_window`: a measured window around a block of Python code, for harnesses that are Python themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gc_sidecar_agent.client import client_from_environment


@dataclass
class MeasuredWindow:
    """A window. After the block `document` is the sidecar's answer, as of `GET /gc/windows/{id}`."""

    id: str
    document: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> dict[str, Any]:
        """The verdict; empty inside the block."""
        verdict: dict[str, Any] = self.document.get("verdict") or {}
        return verdict

    @property
    def is_clean(self) -> bool:
        """Whether GC stayed within the limits, and that is known."""
        return bool(self.verdict.get("clean"))


@contextmanager
def gc_window(
    url: str | None = None,
    name: str | None = None,
    *,
    max_pause_ms: float | None = None,
    token_file: str | None = None,
) -> Iterator[MeasuredWindow]:
    """A window at the sidecar at `url` (default: GC_SIDECAR_URL, or localhost:9470) around the block.

        with gc_window("http://localhost:9470", "sweep-7") as window:
            measure()
        assert window.is_clean, window.verdict["reasons"]

    It is closed however the block ends. Raises ClientError, ValueError, OSError.
    """
    client = client_from_environment(url, token_file)
    opened = client.open_window(name=name, max_pause_ms=max_pause_ms).body["window"]
    window = MeasuredWindow(str(opened["id"]))
    try:
        yield window
    finally:
        window.document = client.close_window(window.id).body["window"]
