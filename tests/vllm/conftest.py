"""What every test on a real vLLM needs: its interpreter and a model.

A missing vLLM fails these tests. Only GC_SIDECAR_WITHOUT_VLLM=1 leaves them out, and that is said
aloud: a run that passed because it did not look proves nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.vllm.real_vllm import VllmMissingError, find_vllm_python, make_tiny_model

HERE = Path(__file__).parent
WITHOUT_VLLM = os.environ.get("GC_SIDECAR_WITHOUT_VLLM") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # pytest calls this with the items of the whole run, not only with those of this directory.
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.vllm)
        item.add_marker(pytest.mark.xdist_group("vllm"))  # one real engine at a time
    if WITHOUT_VLLM and ours:
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in ours]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if WITHOUT_VLLM:
        text = "GC_SIDECAR_WITHOUT_VLLM=1: the tests on a real vLLM were NOT RUN"
        terminalreporter.write_sep("!", text, red=True, bold=True)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter that has vLLM."""
    try:
        return find_vllm_python()
    except VllmMissingError as error:
        reason = str(error)
    pytest.fail(reason, pytrace=False)


@pytest.fixture(scope="session")
def tiny_model(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model for all tests of the run: making it takes longer than a small test."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"), vllm_python)
