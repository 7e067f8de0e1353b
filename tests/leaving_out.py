"""Tests that need what not every machine has."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def leave_out(why: str) -> NoReturn:
    """Skip a test, or a module that cannot be imported, where a developer's machine cannot run it.

    CI must be able to, for a test that did not run proves nothing: there it fails.
    """
    if os.environ.get("CI"):
        pytest.fail(f"CI has to run this: {why}")
    pytest.skip(why, allow_module_level=True)
