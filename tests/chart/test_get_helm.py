"""Which Helm the tests take."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.get_helm import ALL, find_tool
from tests.chart.rendering import helm


def program(path: Path) -> Path:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", ALL)
def test_a_tool_is_the_one_of_the_tools_directory(name: str, tmp_path: Path) -> None:
    assert find_tool(name, {}, tmp_path / "none") is None
    assert program(tmp_path / name) == find_tool(name, {}, tmp_path)


@pytest.mark.parametrize("name", ALL)
def test_a_variable_names_another_and_then_no_other_is_taken(name: str, tmp_path: Path) -> None:
    program(tmp_path / name)
    variables = {f"GC_SIDECAR_{name.upper()}": str(tmp_path / "mine")}

    assert find_tool(name, variables, tmp_path) is None
    assert program(tmp_path / "mine") == find_tool(name, variables, tmp_path)


def test_path_is_not_searched(tmp_path: Path) -> None:
    """Which version it would be nobody knows."""
    program(tmp_path / "helm4")

    assert find_tool("helm4", {"PATH": str(tmp_path)}, tmp_path / "tools") is None


def test_both_helms_are_the_versions_that_the_tests_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # Those that were fetched, where a machine names others for the rest.
    for name in ("GC_SIDECAR_HELM4", "GC_SIDECAR_HELM3"):
        monkeypatch.delenv(name, raising=False)
    assert helm("helm4", "version", "--short").stdout.startswith("v4.3.1")
    assert helm("helm3", "version", "--short").stdout.startswith("v3.17.2")


def test_where_ci_lacks_a_helm_the_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("GC_SIDECAR_HELM4", "/nonexistent/helm")

    with pytest.raises(pytest.fail.Exception, match="there is no helm4"):
        helm("helm4", "version")
