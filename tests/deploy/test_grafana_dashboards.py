"""The Grafana dashboards: kept in step with their code, readable, and asking only what the sidecar answers.

No Grafana runs here. What it would do with the JSON is held against its own types, and what the queries say
is tried out with promtool.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from deploy.grafana.queries import CHECKS, SELECTION, VERDICT, longest_pause_of_engine
from scripts import check_dashboards
from tests.deploy.dashboard_queries import (
    MAY_BE_EMPTY,
    STAND_INS,
    annotation_expressions,
    expressions,
    panels_of,
    substituted,
)
from tests.deploy.metrics import METRICS
from tests.leaving_out import leave_out
from tests.prometheus import promtool

FILES = sorted((Path(__file__).resolve().parents[2] / "deploy" / "grafana").glob("*.json"))
DASHBOARDS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}
PANELS = [
    pytest.param(panel, id=f"{uid}-{panel['title']}")
    for uid, dashboard in DASHBOARDS.items()
    for panel in panels_of(dashboard)
]


def type_of(parameter: Any) -> str:
    return str(parameter.values[0]["type"])


EACH = pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
EACH_PANEL = pytest.mark.parametrize("panel", PANELS)
EACH_TABLE = pytest.mark.parametrize("panel", [p for p in PANELS if type_of(p) == "table"])
EACH_GRAPH = pytest.mark.parametrize(
    "panel", [p for p in PANELS if type_of(p) not in ("table", "stat")]
)

# The library prefers the dashboards of Grafana 12 and later, which 10 and 11 cannot read.
pytestmark = pytest.mark.filterwarnings("ignore:Prefer using dashboardv2:DeprecationWarning")


def tool(name: str) -> str:
    """The path of a tool that a developer may lack, but CI must have."""
    found = shutil.which(name)
    if found is None:
        leave_out(f"`{name}` is not there")
    return found


def all_strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from all_strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from all_strings(inner)


def all_objects(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        for inner in value.values():
            yield from all_objects(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from all_objects(inner)


def queries_of(dashboard: Mapping[str, Any]) -> list[str]:
    """Every query as it stands in the JSON, those of annotations and variables too."""
    return [
        *(target["expr"] for panel in panels_of(dashboard) for target in panel["targets"]),
        *(annotation["expr"] for annotation in dashboard["annotations"]["list"]),
    ]


def variable_queries_of(dashboard: Mapping[str, Any]) -> list[str]:
    return [item["query"] for item in dashboard["templating"]["list"] if item["type"] == "query"]


def parse(exprs: Sequence[str], directory: Path) -> str:
    """What promtool complains of in these expressions; nothing where all parse."""
    rules = [
        {"record": "query:parsed", "labels": {"number": str(number)}, "expr": expr}
        for number, expr in enumerate(exprs)
    ]
    path = directory / "rules.json"
    path.write_text(json.dumps({"groups": [{"name": "dashboards", "rules": rules}]}))
    done = promtool("check", "rules", path)
    return done.stderr.strip() if done.returncode or "FAILED" in done.stderr else ""


def answer_differs(
    expr: str,
    series: Mapping[str, str],
    expected: Mapping[str, float],
    directory: Path,
    *,
    at: str = "10m",
) -> str:
    """How Prometheus' answer to `expr` differs from `expected` (value by labels), given these series."""
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": substituted(expr),
                "eval_time": at,
                "exp_samples": [
                    {"labels": labels, "value": value} for labels, value in expected.items()
                ],
            }
        ],
    }
    path = directory / "test.json"
    # promtool has samples up to the last evaluation only.
    tests = {"rule_files": [], "evaluation_interval": "15s", "tests": [test]}
    path.write_text(json.dumps(tests))
    done = promtool("test", "rules", path)
    return "" if done.returncode == 0 else done.stdout + done.stderr


# The code and the files


def generator() -> Any:
    if sys.version_info < (3, 11):
        leave_out("grafana-foundation-sdk needs Python 3.11 or later")
    from deploy.grafana import dashboards

    return dashboards


def test_the_committed_files_are_what_the_code_writes() -> None:
    assert {path: path.read_text(encoding="utf-8") for path in FILES} == generator().generated()


def test_check_fails_until_the_files_have_been_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dashboards = generator()
    monkeypatch.setattr(dashboards, "DIRECTORY", tmp_path)
    assert dashboards.main(["--check"]) == 1
    assert dashboards.main([]) == 0
    assert dashboards.main(["--check"]) == 0

    path = tmp_path / "gc-sidecar-fleet.json"
    path.write_text(path.read_text(encoding="utf-8").replace("now-1h", "now-2h"), encoding="utf-8")
    capsys.readouterr()
    assert dashboards.main(["--check"]) == 1
    assert "gc-sidecar-fleet.json" in capsys.readouterr().err


def test_the_uids_that_links_rely_on_are_those_of_the_file_names() -> None:
    uids = {name: dashboard["uid"] for name, dashboard in DASHBOARDS.items()}
    assert uids == {name: name for name in ("gc-sidecar-engine", "gc-sidecar-fleet")}


# What Grafana must be able to do with them


@EACH
def test_a_dashboard_asks_whichever_prometheus_is_chosen(dashboard: dict[str, Any]) -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    named = [item["datasource"] for item in all_objects(dashboard) if "datasource" in item]
    assert named
    assert all(source == chosen for source in named)
    assert all(
        "datasource" in target for panel in panels_of(dashboard) for target in panel["targets"]
    )
    assert not {"__inputs", "__requires", "__elements"} & dashboard.keys()


@EACH
def test_every_variable_that_is_used_is_defined(dashboard: dict[str, Any]) -> None:
    defined = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = {
        name
        for text in all_strings(dashboard)
        for name in re.findall(r"\$\{?([A-Za-z_]\w*)", text)
        if not name.startswith("__")
    }
    assert used == defined == {"datasource", "cluster", "namespace", "pod", "instance"}


@EACH
def test_without_kubernetes_the_variables_match_labels_that_are_not_there(
    dashboard: dict[str, Any],
) -> None:
    variables = {item["name"]: item for item in dashboard["templating"]["list"]}
    for name in ("cluster", "namespace", "pod"):
        assert variables[name]["includeAll"]
        assert variables[name]["allValue"] == ".*"
        assert variables[name]["current"]["value"] == ["$__all"]


def test_a_query_selects_series_that_have_no_labels_of_kubernetes(tmp_path: Path) -> None:
    selected = f"gc_sidecar_engine_up{{{SELECTION}}}"
    series = {'gc_sidecar_engine_up{instance="a"}': "1+0x60"}
    assert not answer_differs(selected, series, {'gc_sidecar_engine_up{instance="a"}': 1}, tmp_path)


@EACH
def test_ids_and_titles_are_unique(dashboard: dict[str, Any]) -> None:
    ids = Counter(panel["id"] for panel in dashboard["panels"])
    titles = Counter(panel["title"] for panel in dashboard["panels"])
    assert max(ids.values()) == 1
    assert max(titles.values()) == 1


@EACH
def test_panels_do_not_overlap_and_stay_on_the_grid(dashboard: dict[str, Any]) -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in dashboard["panels"]]
    for title, place in places:
        assert place["x"] >= 0, title
        assert place["x"] + place["w"] <= 24, title
    for (one, a), (other, b) in combinations(places, 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, f"{one!r} and {other!r} overlap"


@EACH_PANEL
def test_a_panel_tells_what_it_shows_and_what_it_means_to_be_empty(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert len(panel["description"].split()) >= 4
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["noValue"]
    assert defaults["unit"]


@EACH_TABLE
def test_a_table_explains_each_column_and_gives_it_a_unit(panel: dict[str, Any]) -> None:
    organize = next(step for step in panel["transformations"] if step["id"] == "organize")
    renamed: dict[str, str] = organize["options"]["renameByName"]
    excluded = organize["options"]["excludeByName"]
    # A single answer has no refId in its name.
    values = {"Value", *(f"Value #{target['refId']}" for target in panel["targets"])}
    overrides = {
        override["matcher"]["options"]: {item["id"] for item in override["properties"]}
        for override in panel["fieldConfig"]["overrides"]
    }
    assert values <= renamed.keys()
    assert overrides.keys() == {name for old, name in renamed.items() if old not in excluded}
    for old, name in renamed.items():
        if old in values and old not in excluded:
            assert {"unit", "noValue", "description"} <= overrides[name], name
        elif old not in excluded:
            assert any(re.search(rf"\b{old}\b", target["expr"]) for target in panel["targets"]), old
    for sorting in panel["options"].get("sortBy", []):
        assert sorting["displayName"] in overrides


@EACH_PANEL
def test_what_is_set_for_a_series_by_name_names_a_series_of_the_panel(
    panel: dict[str, Any],
) -> None:
    if panel["type"] == "table":
        return
    legends = [target.get("legendFormat", "") for target in panel["targets"]]
    # A label's value can be anything.
    patterns = [re.sub(r"\\\{\\\{.*?\\\}\\\}", ".+", re.escape(legend)) for legend in legends]
    for override in panel["fieldConfig"]["overrides"]:
        name = override["matcher"]["options"]
        assert any(re.fullmatch(pattern, name) for pattern in patterns), name


@EACH_GRAPH
def test_a_query_names_the_labels_that_its_legend_shows(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        assert target["legendFormat"]
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert re.search(rf"by \([^)]*\b{label}\b[^)]*\)", target["expr"]), label


def test_a_row_of_the_fleet_leads_to_its_engine() -> None:
    fleet = DASHBOARDS["gc-sidecar-fleet"]
    table = next(panel for panel in panels_of(fleet) if panel["type"] == "table")
    assert table is next(panels_of(fleet))
    urls = [text for text in all_strings(table) if text.startswith("/d/")]
    assert len(urls) == 2
    for url in urls:
        assert url.startswith("/d/gc-sidecar-engine?")
        assert "var-instance=${__data.fields.instance}" in url
        assert "${__url_time_range}" in url


@EACH
def test_each_dashboard_leads_to_the_other(dashboard: dict[str, Any]) -> None:
    (other,) = DASHBOARDS.keys() - {dashboard["uid"]}
    (link,) = dashboard["links"]
    assert link["url"] == f"/d/{other}"
    assert link["includeVars"]
    assert link["keepTime"]


def test_an_annotation_asks_the_same_in_old_and_new_versions() -> None:
    annotations = DASHBOARDS["gc-sidecar-engine"]["annotations"]["list"]
    assert [annotation["name"] for annotation in annotations] == ["Operations", "Measured windows"]
    for annotation in annotations:
        assert annotation["expr"] == annotation["target"]["expr"]


# The queries


@EACH
def test_every_query_parses(dashboard: dict[str, Any], tmp_path: Path) -> None:
    asked = expressions(dashboard) + annotation_expressions(dashboard)
    assert len(asked) == len(queries_of(dashboard))
    assert parse([expression.expr for expression in asked], tmp_path) == ""


def test_a_query_that_does_not_parse_is_found(tmp_path: Path) -> None:
    assert "parse error" in parse(["up", "sum by (instance) (up"], tmp_path)


@EACH
def test_no_variable_is_left_in_an_expression_for_prometheus(dashboard: dict[str, Any]) -> None:
    assert not [asked for asked in expressions(dashboard) if "$" in asked.expr]
    assert not [asked for asked in annotation_expressions(dashboard) if "$" in asked.expr]


@EACH
def test_queries_ask_for_metrics_that_exist_and_select_by_the_variables(
    dashboard: dict[str, Any],
) -> None:
    for query in queries_of(dashboard):
        names = re.findall(r"\bgc_sidecar_\w+", query)
        assert names, query
        assert set(names) <= METRICS.keys(), query
        selected = re.findall(r"\b(gc_sidecar_\w+)\{" + re.escape(SELECTION), query)
        assert selected == names, query
    for query in variable_queries_of(dashboard):
        assert set(re.findall(r"\bgc_sidecar_\w+", query)) <= METRICS.keys(), query


def test_every_metric_is_on_a_dashboard() -> None:
    text = " ".join(query for dashboard in DASHBOARDS.values() for query in queries_of(dashboard))
    asked = {metric_of(sample) for sample in re.findall(r"\bgc_sidecar_\w+", text)}
    assert asked == {metric_of(sample) for sample in METRICS.keys() - {"up"}}


def metric_of(sample: str) -> str:
    """The metric that a sample belongs to: a histogram or a summary has several."""
    return re.sub("_(bucket|count|sum)$", "", sample)


@EACH_GRAPH
def test_rates_follow_the_zoom(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        windows = re.findall(r"\b(?:rate|increase)\([^\[]*\[([^\]]+)\]", target["expr"])
        # The verdict looks at fixed stretches of time: what was then does not depend on the zoom.
        assert target["expr"] == VERDICT or set(windows) <= {"$__rate_interval"}


def test_what_may_be_empty_is_a_query_that_exists() -> None:
    asked = {
        (uid, asked.panel, asked.ref_id)
        for uid, dashboard in DASHBOARDS.items()
        for asked in expressions(dashboard)
    }
    assert asked >= MAY_BE_EMPTY.keys()
    needs = {
        (uid, asked.panel, asked.ref_id)
        for uid, dashboard in DASHBOARDS.items()
        for asked in expressions(dashboard)
        # The verdict comes without a limit too.
        if re.search(r"memory_limit_bytes|device_memory", asked.expr)
        and asked.expr != substituted(VERDICT)
    }
    assert needs == set(MAY_BE_EMPTY)


def test_every_stand_in_stands_for_something() -> None:
    text = " ".join(query for dashboard in DASHBOARDS.values() for query in queries_of(dashboard))
    assert {name for name in STAND_INS if name in text} == STAND_INS.keys()


# What the queries mean

STEADY = "x60"
SAFE_ENGINE = {
    "engine_up": "1",
    'policy{mode="off"}': "0",
    'policy{mode="freeze"}': "1",
    "coverage_ratio": "1",
    'in_progress_seconds{role="worker"}': "0",
    'pause_seconds_sum{role="worker",trigger="auto"}': "3",
    'pause_seconds_sum{role="worker",trigger="requested"}': "1",
    "lease_expires_timestamp_seconds": "4000",
    "memory_current_bytes": "50",
    "memory_limit_bytes": "100",
}


def engine_series(labels: str, changed: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ten minutes of an engine that is safe to measure, but for what is `changed`."""
    series = {}
    for name, value in (SAFE_ENGINE | dict(changed or {})).items():
        metric, _, own = name.rstrip("}").partition("{")
        all_labels = ",".join(filter(None, (labels, own)))
        series[f"gc_sidecar_{metric}{{{all_labels}}}"] = (
            value if "x" in value else f"{value}+0{STEADY}"
        )
    return series


@pytest.mark.parametrize(
    "labels",
    [
        'instance="a"',
        'cluster="c",instance="a",namespace="n",pod="p"',
    ],
    ids=["without Kubernetes", "in Kubernetes"],
)
def test_a_frozen_engine_without_pauses_is_safe_to_measure(labels: str, tmp_path: Path) -> None:
    assert not answer_differs(VERDICT, engine_series(labels), {f"{{{labels}}}": 0}, tmp_path)


VERDICTS = {
    "sidecar": {name: f"{value}+0x20 stale" for name, value in SAFE_ENGINE.items()},
    "engine": {"engine_up": "0"},
    "policy": {'policy{mode="off"}': "1", 'policy{mode="freeze"}': "0"},
    "coverage": {"coverage_ratio": "0.75"},
    "collecting": {'in_progress_seconds{role="worker"}': "0+0x39 2"},
    "paused": {'pause_seconds_sum{role="worker",trigger="auto"}': "3+0x30 4+0x30"},
    "lease": {"lease_expires_timestamp_seconds": "700"},
    "memory": {"memory_current_bytes": "96"},
}


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_the_verdict_gives_the_reason_against_measuring(check: Any, tmp_path: Path) -> None:
    labels = 'instance="a"'
    series = engine_series(labels, VERDICTS[check.name])
    assert not answer_differs(VERDICT, series, {f"{{{labels}}}": check.code}, tmp_path)
    # And it is this reason that gives it: without the change the verdict is another one.
    assert answer_differs(VERDICT, engine_series(labels), {f"{{{labels}}}": check.code}, tmp_path)


def test_of_several_reasons_the_gravest_is_shown_for_each_engine(tmp_path: Path) -> None:
    series = engine_series(
        'instance="a"', VERDICTS["memory"] | VERDICTS["engine"] | VERDICTS["policy"]
    ) | engine_series('instance="b"', VERDICTS["lease"])
    expected = {'{instance="a"}': 7.0, '{instance="b"}': 2.0}
    assert not answer_differs(VERDICT, series, expected, tmp_path)


def test_a_collection_that_somebody_asked_for_is_no_reason_against_measuring(
    tmp_path: Path,
) -> None:
    asked_for = {'pause_seconds_sum{role="worker",trigger="requested"}': "1+0x30 9+0x30"}
    series = engine_series('instance="a"', asked_for)
    assert not answer_differs(VERDICT, series, {'{instance="a"}': 0}, tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(
            {'policy{mode="off"}': "1+0x28 0+0x30", 'policy{mode="freeze"}': "0+0x28 1+0x30"},
            id="before the policy was entered",
        ),
        pytest.param(
            {'policy{mode="budget"}': "1+0x28 0+0x30", 'policy{mode="freeze"}': "0+0x28 1+0x30"},
            id="under another policy",
        ),
        pytest.param({"coverage_ratio": "0.75+0x28 1+0x30"}, id="while a process restarted"),
    ],
)
def test_a_collection_from_before_every_process_had_the_policy_is_no_reason_against_measuring(
    changed: Mapping[str, str], tmp_path: Path
) -> None:
    """The pause is seen at 6 minutes, the change at 7; the verdict is asked for at 10."""
    pause = {'pause_seconds_sum{role="worker",trigger="auto"}': "3+0x23 4+0x35"}
    paused = next(check.code for check in CHECKS if check.name == "paused")
    labels = '{instance="a"}'
    assert not answer_differs(
        VERDICT, engine_series('instance="a"', pause), {labels: paused}, tmp_path
    )
    series = engine_series('instance="a"', pause | dict(changed))
    assert not answer_differs(VERDICT, series, {labels: 0}, tmp_path)


def test_a_process_in_any_state_but_applied_does_not_follow_the_policy(tmp_path: Path) -> None:
    panel = next(
        panel
        for panel in panels_of(DASHBOARDS["gc-sidecar-fleet"])
        if panel["title"] == "Processes that do not follow the policy"
    )
    states = ("applied", "pending", "drifted", "stale", "gone", "uncovered", "refused")
    series = {
        f'gc_sidecar_processes{{instance="a",state="{state}"}}': f"{10**power}+0x60"
        for power, state in enumerate(states)
    }
    (target,) = panel["targets"]
    assert not answer_differs(target["expr"], series, {'{instance="a"}': 1_111_110}, tmp_path)
    assert not [state for state in states if state not in panel["description"]]


def test_an_engine_without_limit_lease_and_processes_still_gets_a_verdict(tmp_path: Path) -> None:
    series = {
        name: values
        for name, values in engine_series('instance="a"').items()
        if not re.search("limit|lease|pause|progress", name)
    }
    assert not answer_differs(VERDICT, series, {'{instance="a"}': 0}, tmp_path)


def pause_series(
    before: Mapping[float, int], later: Mapping[float, int], trigger: str = "auto"
) -> dict[str, str]:
    """A histogram with the pauses (length: count) of `before`, to which `later` are added after 9 minutes."""
    edges = (0.1, 1.0, 10.0, float("inf"))
    series = {}
    for edge in edges:
        old = sum(count for length, count in before.items() if length <= edge)
        new = old + sum(count for length, count in later.items() if length <= edge)
        le = "+Inf" if edge == float("inf") else f"{edge:g}"
        own = f'instance="a",role="worker",trigger="{trigger}",le="{le}"'
        name = f"gc_sidecar_pause_seconds_bucket{{{own}}}"
        series[name] = f"{old}+0x36 {new}+0x10"
    return series


@pytest.mark.parametrize(
    ("before", "later", "shown"),
    [
        pytest.param({5.0: 7}, {0.05: 1}, 0.1, id="short after long ones"),
        pytest.param({0.05: 7}, {5.0: 1}, 10.0, id="long after short ones"),
        pytest.param({5.0: 7}, {0.05: 3, 0.5: 2}, 1.0, id="the longest of several"),
        pytest.param({}, {0.5: 1}, 1.0, id="the first of all"),
        pytest.param({0.05: 7}, {50.0: 1}, 10.0, id="beyond the highest edge"),
    ],
)
def test_the_longest_pause_is_that_of_the_window_whatever_was_before(
    before: Mapping[float, int], later: Mapping[float, int], shown: float, tmp_path: Path
) -> None:
    query = longest_pause_of_engine("$__rate_interval")
    series = pause_series(before, later)
    # Between two scrapes, where increase() would extrapolate.
    assert not answer_differs(query, series, {'{instance="a"}': shown}, tmp_path, at="9m25s")


def test_a_long_pause_counts_beside_many_short_ones_that_were_asked_for(tmp_path: Path) -> None:
    series = pause_series({}, {5.0: 1}) | pause_series({}, {0.05: 3}, trigger="requested")
    query = longest_pause_of_engine("1m")
    assert not answer_differs(query, series, {'{instance="a"}': 10}, tmp_path, at="9m25s")


def test_there_is_no_longest_pause_where_none_happened(tmp_path: Path) -> None:
    series = pause_series({5.0: 7}, {})
    assert not answer_differs(longest_pause_of_engine("1m"), series, {}, tmp_path, at="9m30s")


@pytest.mark.parametrize(("mode", "code"), [("off", 1), ("freeze", 2), ("budget", 3), ("new", 0)])
def test_the_policy_timeline_tells_the_policies_apart(mode: str, code: int, tmp_path: Path) -> None:
    timeline = next(
        panel for panel in panels_of(DASHBOARDS["gc-sidecar-fleet"]) if panel["title"] == "Policy"
    )
    texts = timeline["fieldConfig"]["defaults"]["mappings"][0]["options"]
    series = {
        f'gc_sidecar_policy{{instance="a",mode="{each}"}}': f"{int(each == mode)}+0x60"
        for each in {"off", "freeze", "budget", mode}
    }
    (target,) = timeline["targets"]
    assert not answer_differs(target["expr"], series, {'{instance="a"}': code}, tmp_path)
    assert texts[str(code)]["text"] == (mode if code else "unknown")


# Grafana's own types


@pytest.fixture(scope="module")
def schema_tools() -> None:
    tool("npm")
    tool("node")


@pytest.mark.usefixtures("schema_tools")
def test_grafanas_types_find_nothing_wrong() -> None:
    assert check_dashboards.problems(list(DASHBOARDS.values())) == []


def panel_of_type(dashboard: dict[str, Any], type_: str) -> dict[str, Any]:
    found: dict[str, Any] = next(p for p in panels_of(dashboard) if p["type"] == type_)
    return found


def misspelt(target: dict[str, Any], name: str) -> None:
    target[name + "x"] = target.pop(name)


@pytest.mark.usefixtures("schema_tools")
def test_grafanas_types_find_every_kind_of_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One compiler run for all: each mistake must be reported where it was made."""
    broken = copy.deepcopy(DASHBOARDS["gc-sidecar-engine"])
    mistakes: dict[str, str] = {}

    def in_panel(type_: str, complaint: str) -> dict[str, Any]:
        panel = panel_of_type(broken, type_)
        mistakes[f"{broken['uid']}.panel-{panel['id']}.ts"] = complaint
        return panel

    misspelt(in_panel("heatmap", "cellGapx")["options"], "cellGap")
    in_panel("timeseries", "Type 'string'")["fieldConfig"]["defaults"]["custom"]["lineWidth"] = (
        "thick"
    )
    in_panel("stat", "sideways")["options"]["justifyMode"] = "sideways"
    misspelt(in_panel("state-timeline", "legendFormatx")["targets"][0], "legendFormat")
    in_panel("table", "widthx")["fieldConfig"]["overrides"][0]["properties"].append(
        {"id": "custom.widthx", "value": 1}
    )
    misspelt(broken["annotations"]["list"][0], "iconColor")
    mistakes[f"{broken['uid']}.annotations.ts"] = "iconColor"
    misspelt(broken["templating"]["list"][1], "includeAll")
    mistakes[f"{broken['uid']}.dashboard.ts"] = "includeAllx"

    path = tmp_path / "broken.json"
    path.write_text(json.dumps(broken))
    assert check_dashboards.main([str(path)]) == 1
    found = capsys.readouterr().err.splitlines()
    for schema in check_dashboards.SCHEMAS:
        for module, complaint in mistakes.items():
            assert any(
                schema.package.version in problem and module in problem and complaint in problem
                for problem in found
            ), f"{module} by {schema.package.version}: {complaint} is not among {found}"
    assert all(any(module in problem for module in mistakes) for problem in found)


def test_the_schema_check_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_dashboards.main([]) == 2
    assert "`node` is needed" in capsys.readouterr().err
