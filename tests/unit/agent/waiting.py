"""Waiting for something, with a deadline, instead of sleeping and hoping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], deadline_s: float = 10.0, what: str = "") -> T:
    """The first true value of `condition`, which is tried again and again; AssertionError at the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what or condition!r}"
        time.sleep(0.002)
