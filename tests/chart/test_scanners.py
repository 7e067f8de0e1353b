"""checkov on what the presets render: .checkov.yaml explains each of its findings, and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.chart.cases import BY_NAME
from tests.chart.rendering import CHART, PRESETS, judge, render_text

CONFIGURATION = CHART / ".checkov.yaml"
SCANNER_DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The failed checks by file, none left out."""
    directory = tmp_path_factory.mktemp("rendered")
    for preset in PRESETS:
        (directory / f"{preset}.yaml").write_text(render_text(preset=preset))
    (directory / "serve.yaml").write_text(render_text({"mode": "serve"}))
    exposed = BY_NAME["serve with the control listener exposed"].values
    (directory / "exposed.yaml").write_text(render_text(exposed))
    result = subprocess.run(
        [judge("checkov"), "--directory", str(directory), "--framework", "kubernetes", "--skip-download",
         "--output", "json", "--quiet", "--compact"],
        capture_output=True, text=True, timeout=SCANNER_DEADLINE_S, cwd=directory,
    )  # fmt: skip
    report = json.loads(result.stdout)
    assert report["summary"]["parsing_errors"] == 0
    assert report["summary"]["passed"] > 80 * len(PRESETS)
    found: dict[str, set[str]] = {path.name: set() for path in directory.iterdir()}
    for check in report["results"]["failed_checks"]:
        found[Path(check["file_path"]).name].add(check["check_id"])
    return found


def explained() -> set[str]:
    skipped: list[str] = yaml.safe_load(CONFIGURATION.read_text())["skip-check"]
    return set(skipped)


def test_checkov_finds_nothing_that_is_not_explained(findings: dict[str, set[str]]) -> None:
    assert {name: ids - explained() for name, ids in findings.items() if ids - explained()} == {}


def test_every_explanation_is_of_something_that_is_found(findings: dict[str, set[str]]) -> None:
    assert explained() == set().union(*findings.values())


def test_every_check_that_is_left_out_has_its_reason_above_it() -> None:
    lines = CONFIGURATION.read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r"\s+- CKV", line):
            assert lines[number - 1].strip().startswith("# "), line
