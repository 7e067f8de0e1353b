"""What the agent's tests need of the machine."""

from __future__ import annotations

import os

import pytest

from tests.leaving_out import leave_out
from tests.unit.agent.mounting import may_mount


@pytest.fixture
def tmpfs_may_be_mounted() -> None:
    if not may_mount():
        leave_out("this user may not mount a tmpfs")


@pytest.fixture
def directory_may_be_unwritable() -> None:
    # Root writes everywhere but on a read-only file system.
    if os.geteuid() == 0 and not may_mount():
        leave_out("root that may not mount a read-only tmpfs")
