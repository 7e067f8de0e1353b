"""The judges' process, and which tests share one of pytest's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chart.rendering import Judge

DIRECTORY = Path(__file__).parent


@pytest.fixture(scope="session")
def judge() -> Iterator[Judge]:
    """Says what is wrong with objects."""
    it = Judge()
    yield it
    it.close()


def group_of(item: pytest.Function) -> str | None:
    """What a test shares with others: the judges and the scanner start once, a case is rendered once."""
    if "judge" in item.fixturenames:
        return "judged"
    if "findings" in item.fixturenames:
        return "scanned"
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    return None if case is None else str(case)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if DIRECTORY in item.path.parents and isinstance(item, pytest.Function):
            group = group_of(item)
            if group is not None:
                item.add_marker(pytest.mark.xdist_group(f"chart, {group}"))
