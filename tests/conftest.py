"""How many tests run at once and in which order, and pytest's own heap."""

from __future__ import annotations

import gc
import os
import signal

import pytest

# What tests have in common asserts, too, and a failure there shall say what it met.
pytest.register_assert_rewrite(
    "tests.conformance",
    "tests.embedded.engine",
    "tests.faults",
    "tests.chart.rendering",
    "tests.observing",
    "tests.page",
    "tests.sidecar_process",
    "tests.unit",
    "tests.vllm.scene",
)

# Tests start hundreds of processes, each of which would compile the packages again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# Where we run in the background these are ignored, and whatever a test starts would inherit that.
for _number, _handler in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


def pytest_xdist_auto_num_workers() -> int:
    # Most tests wait for processes, so more of them may run at once than there are cores.
    return max(4, os.cpu_count() or 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Several run at a time: the longest go first, and the short ones fill the gaps at the end.
    items.sort(key=lambda item: not {"embedded", "readme", "deploy"} & {*item.path.parts})


def pytest_collection_finish() -> None:
    # What was imported and collected stays: a full collection need not walk it again at every few tests.
    gc.freeze()
