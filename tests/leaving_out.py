"""Tests that need what not every machine has."""

from __future__ import annotations

import os

import pytest


def leave_out(why: str) -> None:
    """Skip where a developer's machine cannot do it. CI must, for a test that did not run proves nothing."""
    if os.environ.get("CI"):
        pytest.fail(f"CI has to run this: {why}")
    pytest.skip(why)
