"""The Prometheus rules, held against the real promtool, the metrics that /metrics has, and their runbook.

What the rules do is in promtool's own tests beside them (`*.test.yaml`); here those run, and are looked over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.get_prometheus import DIRECTORY_VARIABLE, PROGRAMS, find_prometheus
from tests.deploy.metrics import METRICS
from tests.prometheus import promtool

REPOSITORY = Path(__file__).resolve().parents[2]
DIRECTORY = REPOSITORY / "deploy" / "prometheus"
RULES = DIRECTORY / "gc-sidecar.rules.yaml"
TESTS = sorted(DIRECTORY.glob("*.test.yaml"))
RUNBOOK = REPOSITORY / "docs" / "runbook.md"
RUNBOOK_URL = "https://github.com/gc-sidecar/gc-sidecar/blob/main/docs/runbook.md"

TARGET_LABELS = {"job", "instance", "cluster", "namespace", "pod"}

DOCUMENT = yaml.safe_load(RULES.read_text())
ALL_RULES: list[dict[str, Any]] = [rule for group in DOCUMENT["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in ALL_RULES if "alert" in rule}
RECORDS = {rule["record"]: rule for rule in ALL_RULES if "record" in rule}


@dataclass(frozen=True)
class Case:
    """One of promtool's own tests."""

    document: dict[str, Any]
    """The whole file that it is in."""
    test: dict[str, Any]


CASES = [
    Case(document, test)
    for document in (yaml.safe_load(path.read_text()) for path in TESTS)
    for test in document["tests"]
]

each_alert = pytest.mark.parametrize("name", ALERTS)
each_record = pytest.mark.parametrize("name", RECORDS)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.test["name"])
each_rule = pytest.mark.parametrize("rule", ALL_RULES, ids=[*RECORDS, *ALERTS])


@dataclass(frozen=True)
class Selector:
    """A metric in an expression: its name, and what its matchers ask of labels."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


CLAUSE = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
KEYWORDS = {"and", "or", "unless", "offset", "bool"}


def selectors_of(expression: str) -> Iterator[Selector]:
    """Every metric that the expression reads."""
    bare = re.sub(r"\[[^\]]*\]", "", CLAUSE.sub("", expression))
    for found in re.finditer(r"(?<![\w:.])([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?\s*(\()?", bare):
        name, braces, call = found.groups()
        if call is None and name not in KEYWORDS:
            matchers = re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', braces or "")
            yield Selector(name, tuple(matchers))


def faults_of(expression: str) -> list[str]:
    """Metrics, labels and values in the expression that no /metrics has."""
    faults = []
    for selector in selectors_of(expression):
        if selector.name in RECORDS:
            continue
        labels = METRICS.get(selector.name)
        if labels is None:
            faults.append(f"no metric {selector.name}")
            continue
        for label, operator, text in selector.matchers:
            values = text.split("|") if "~" in operator else [text]
            allowed = labels.get(label, ())
            faults += [
                f'{selector.name} has no {label}="{value}"'
                for value in values
                if allowed is not None and value not in allowed
            ]
    known = {label for labels in METRICS.values() for label in labels} | TARGET_LABELS
    for clause in CLAUSE.findall(expression):
        faults += [
            f"no label {label}" for label in re.findall(r"\w+", clause) if label not in known
        ]
    return faults


def content(*arguments: str | Path) -> str:
    """What promtool says; the test fails with it where promtool is not content."""
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_rules() -> None:
    said = content("check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert f"{len(ALL_RULES)} rules found" in said


def test_promtool_accepts_the_example_configuration() -> None:
    assert "1 rule files found" in content("check", "config", DIRECTORY / "prometheus.example.yaml")


@each_case
def test_the_rules_pass_their_own_tests(case: Case, tmp_path: Path) -> None:
    """Each case by itself, so that they run side by side: promtool takes a file's one after the other."""
    rule_files = [str((DIRECTORY / name).resolve()) for name in case.document["rule_files"]]
    alone = case.document | {"rule_files": rule_files, "tests": [case.test]}
    path = tmp_path / "case.test.json"
    path.write_text(json.dumps(alone))
    assert "SUCCESS" in content("test", "rules", path)


@each_rule
def test_a_rule_reads_only_metrics_labels_and_values_that_exist(rule: dict[str, Any]) -> None:
    assert faults_of(rule["expr"]) == []


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("rate(gc_sidecar_stalls_total[5m]) > 0", "no metric gc_sidecar_stalls_total"),
        (
            'sum without (state) (gc_sidecar_processes{state=~"drifted|dead"}) > 0',
            'gc_sidecar_processes has no state="dead"',
        ),
        (
            'gc_sidecar_engine_up{rank="0"} == 0',
            'gc_sidecar_engine_up has no rank="0"',
        ),
        ("up == 0 and ignoring (versoin) gc_sidecar_build_info", "no label versoin"),
    ],
)
def test_a_misspelt_expression_would_be_found(expression: str, fault: str) -> None:
    assert faults_of(expression) == [fault]


@each_case
def test_a_case_has_only_series_that_could_be_scraped(case: Case) -> None:
    """A misspelt series would make every silent case true for the wrong reason."""
    for entry in case.test["input_series"]:
        (selector,) = selectors_of(entry["series"])
        labels = {label: value for label, _, value in selector.matchers}
        assert selector.name in METRICS, entry["series"]
        expected = METRICS[selector.name]
        assert labels.keys() - TARGET_LABELS == expected.keys(), entry["series"]
        assert {"job", "instance"} <= labels.keys(), entry["series"]
        for label, allowed in expected.items():
            assert allowed is None or labels[label] in allowed, entry["series"]


@each_record
def test_a_recording_rule_is_named_after_level_metric_and_operations(name: str) -> None:
    level, metric, operations = name.split(":")
    assert level in ("instance", "instance_dp_rank", "process")
    assert metric.startswith("gc_sidecar_")
    assert operations


@each_record
def test_a_recording_rule_has_a_test_of_its_value(name: str) -> None:
    tests = [test for case in CASES for test in case.test.get("promql_expr_test", ())]
    values = [
        test["exp_samples"]
        for test in tests
        if name in {selector.name for selector in selectors_of(test["expr"])}
    ]
    assert any(samples for samples in values)


def alert_tests(name: str) -> list[dict[str, Any]]:
    tests = [test for case in CASES for test in case.test.get("alert_rule_test", ())]
    return [test for test in tests if test["alertname"] == name]


@each_alert
def test_an_alert_has_a_test_that_fires_it_with_and_without_kubernetes(name: str) -> None:
    fired = [alert["exp_labels"] for test in alert_tests(name) for alert in test["exp_alerts"]]
    assert any({"cluster", "namespace", "pod"} <= labels.keys() for labels in fired)
    assert any(not {"cluster", "namespace", "pod"} & labels.keys() for labels in fired)


@each_alert
def test_an_alert_has_a_case_of_its_own_in_which_it_stays_silent(name: str) -> None:
    """Not only the moment before it fires: a case that it never fires in."""
    silent = [
        case
        for case in CASES
        if (tests := [t for t in case.test.get("alert_rule_test", ()) if t["alertname"] == name])
        and not any(test["exp_alerts"] for test in tests)
    ]
    assert silent


@each_alert
def test_an_alert_names_only_labels_that_it_has(name: str) -> None:
    """An absent label reads as nothing. `pod` may be absent, where `instance` stands in for it."""
    annotations = ALERTS[name]["annotations"]
    named = set(re.findall(r"\$labels\.(\w+)", " ".join(annotations.values()))) - {"pod"}
    for test in alert_tests(name):
        for alert in test["exp_alerts"]:
            assert named <= alert["exp_labels"].keys()
    whole = annotations["description"].replace("{{ or $labels.pod $labels.instance }}", "")
    assert "$labels.pod" not in whole


@each_alert
def test_an_alert_tells_what_it_is_and_wakes_nobody(name: str) -> None:
    rule = ALERTS[name]
    assert name.startswith("GcSidecar")
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in ("info", "warning")
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert all(text.strip() for text in rule["annotations"].values())


def runbook() -> dict[str, str]:
    """The text below each heading of the runbook."""
    _, *parts = re.split(r"^## (\w+)$", RUNBOOK.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@each_alert
def test_an_alert_leads_to_a_paragraph_that_says_how_to_check(name: str) -> None:
    assert ALERTS[name]["annotations"]["runbook_url"] == f"{RUNBOOK_URL}#{name.lower()}"
    paragraph = runbook()[name]
    referred = "](#gcsidecar" in paragraph
    assert re.search(r"^    \S", paragraph, re.MULTILINE) or referred


def test_the_runbook_has_no_paragraph_without_an_alert() -> None:
    assert runbook().keys() == ALERTS.keys()


def test_the_runbook_asks_prometheus_for_what_exists() -> None:
    lines = re.findall(r"^    (?!curl)(.+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert lines
    for line in lines:
        assert faults_of(line.replace('{instance="INSTANCE"}', "")) == [], line


def programs_in(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in PROGRAMS:
        (directory / name).touch(mode=0o755)
    return directory


def test_prometheus_is_taken_from_where_the_variable_says_and_nowhere_else(tmp_path: Path) -> None:
    tools, named = programs_in(tmp_path / "tools"), programs_in(tmp_path / "named")
    assert find_prometheus({DIRECTORY_VARIABLE: str(named)}, tools) == named
    (named / "promtool").unlink()
    assert find_prometheus({DIRECTORY_VARIABLE: str(named)}, tools) is None


def test_prometheus_of_the_tools_goes_before_that_on_the_path(tmp_path: Path) -> None:
    tools, on_path = programs_in(tmp_path / "tools"), programs_in(tmp_path / "bin")
    assert find_prometheus({"PATH": str(on_path)}, tools) == tools
    assert find_prometheus({"PATH": str(on_path)}, tmp_path / "none") == on_path
    assert find_prometheus({"PATH": str(tmp_path)}, tmp_path / "none") is None
