"""The order of a run."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Several run at a time: the longest go first, and the short ones fill the gaps at the end.
    items.sort(key=lambda item: not {"embedded", "deploy"} & {*item.path.parts})
