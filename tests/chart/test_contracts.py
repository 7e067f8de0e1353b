"""The chart against what it talks to: our own commands, its copies of deploy/, its README, what it tells."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gc_sidecar.__main__ import VERBS as SIDECAR_VERBS
from gc_sidecar_agent import __version__
from gc_sidecar_agent.cli import VERBS as INJECTED_VERBS
from gc_sidecar_agent.cli import Verb, build_parser
from scripts import chart_readme
from tests.chart.cases import BENCHMARKS, BY_NAME, CASES, Case
from tests.chart.rendering import (
    CHART,
    REPOSITORY,
    Document,
    arguments,
    container,
    environment,
    helm,
    of_kind,
    pod,
    render,
    workload,
)

# Variables of `run` that are no flags: what the report says of the place.
PLACE = {
    f"GC_SIDECAR_{name}" for name in ("IMAGE", "NODE", "POD", "NAMESPACE", "GPU", "ENGINE_ARGS")
}
DASHBOARDS, RULES = CHART / "dashboards", CHART / "rules"
DEPLOY = REPOSITORY / "deploy"
ORIGINALS = [
    *(DEPLOY / "grafana").glob("gc-sidecar-*.json"),
    DEPLOY / "prometheus" / "gc-sidecar.rules.yaml",
]
COPIES = {
    (DASHBOARDS if original.suffix == ".json" else RULES) / original.name: original
    for original in ORIGINALS
}


def parsed(verbs: Mapping[str, Verb], words: list[str]) -> Any:
    """What our real command line makes of `words`; a word that it does not know ends the test."""
    return build_parser(verbs, chosen=words[0]).parse_args(words)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_our_own_commands_take_the_flags_that_they_are_given(case: Case) -> None:
    documents = case.render()
    for name in ("install-agent", "gc-sidecar"):
        each = container(documents, name)
        assert each["command"][0] == "gc-sidecar"
        parsed(SIDECAR_VERBS, [*each["command"][1:], *each["args"]])


@pytest.mark.parametrize("case", BENCHMARKS, ids=str)
def test_run_takes_the_flags_that_it_is_given_and_the_command_as_it_is(case: Case) -> None:
    documents = case.render()
    each = container(documents, "benchmark")

    args = parsed(INJECTED_VERBS, [*each["command"][1:], *each["args"]])

    assert args.command[0] == "--"
    assert args.command[1:] == each["args"][each["args"].index("--") + 1 :]
    of_sidecar = container(documents, "gc-sidecar")
    sidecar = parsed(SIDECAR_VERBS, ["serve", *of_sidecar["args"]])
    # Whoever asks in the sidecar's container needs no flag: there it is in the environment.
    variables = environment(of_sidecar)
    assert args.url == [variables["GC_SIDECAR_URL"]] == [f"http://localhost:{sidecar.port}"]
    assert args.token_file == variables.get("GC_SIDECAR_TOKEN_FILE")
    assert args.policy in ("freeze", "budget", "off")
    # The owner that the status names is the Job that people see.
    assert args.owner in ("me", workload(documents)["metadata"]["name"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_variable_of_ours_is_one_that_nobody_reads(case: Case) -> None:
    for each in [*pod(case.render())["initContainers"], *pod(case.render())["containers"]]:
        own = {
            item["name"] for item in each.get("env", []) if item["name"].startswith("GC_SIDECAR_")
        }
        read = {
            "benchmark": PLACE,
            "gc-sidecar": {
                *("GC_SIDECAR_RUN_DIR", "GC_SIDECAR_ENGINE_URL", "GC_SIDECAR_URL"),
                "GC_SIDECAR_TOKEN_FILE",
            },
        }
        assert own <= read.get(each["name"], {"GC_SIDECAR_RUN_DIR"})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_selectors_find_the_pod_and_ports_are_there(case: Case) -> None:
    documents = case.render()
    found = workload(documents)["spec"]["template"]
    labels = found["metadata"]["labels"]
    ports = {
        port["name"]: port["containerPort"]
        for each in [*found["spec"]["initContainers"], *found["spec"]["containers"]]
        for port in each.get("ports", [])
    }

    def selects(selector: Mapping[str, str], of: Mapping[str, str]) -> bool:
        return selector.items() <= of.items()

    services = of_kind(documents, "Service")
    for service in services:
        assert selects(service["spec"]["selector"], labels)
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports.values())
    for policy in of_kind(documents, "NetworkPolicy"):
        assert selects(policy["spec"]["podSelector"]["matchLabels"], labels)
    for monitor in of_kind(documents, "PodMonitor"):
        assert selects(monitor["spec"]["selector"]["matchLabels"], labels)
        assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} <= set(ports)
    for monitor in of_kind(documents, "ServiceMonitor"):
        (service,) = (
            each
            for each in services
            if selects(monitor["spec"]["selector"]["matchLabels"], each["metadata"]["labels"])
        )
        names = {port["name"] for port in service["spec"]["ports"]}
        assert {each["port"] for each in monitor["spec"]["endpoints"]} <= names
    for each in of_kind(documents, "Deployment"):
        assert selects(each["spec"]["selector"]["matchLabels"], labels)


def test_the_service_for_vllm_publishes_nothing_of_ours() -> None:
    documents = BY_NAME["serve with the control listener exposed"].render()
    for service in of_kind(documents, "Service"):
        ports = {port["port"] for port in service["spec"]["ports"]}
        assert ports == (
            {8000} if service["spec"].get("clusterIP") != "None" else {9470} | ports - {8000}
        )


@pytest.mark.parametrize("copy", COPIES, ids=lambda path: path.name)
def test_dashboards_and_rules_are_those_of_deploy(copy: Path) -> None:
    assert copy.read_text() == COPIES[copy].read_text(), "make chart copies it"


def test_nothing_else_lies_among_the_copies() -> None:
    assert set(COPIES) == {*DASHBOARDS.iterdir(), *RULES.iterdir()}


def test_rules_and_dashboards_are_rendered_as_they_are() -> None:
    """Their own braces are Prometheus's and Grafana's, not Helm's."""
    documents = BY_NAME["everything monitored"].render()

    (rule,) = of_kind(documents, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((RULES / "gc-sidecar.rules.yaml").read_text())
    assert rule["metadata"]["labels"]["role"] == "alert-rules"
    boards = of_kind(documents, "ConfigMap")
    found = {name: json.loads(text) for board in boards for name, text in board["data"].items()}
    assert found == {path.name: json.loads(path.read_text()) for path in DASHBOARDS.iterdir()}
    assert len({board["metadata"]["name"] for board in boards}) == len(boards)
    for board in boards:
        assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert board["metadata"]["annotations"] == {"grafana_folder": "vLLM"}


@pytest.mark.parametrize("kind", ["podMonitor", "serviceMonitor", "prometheusRule"])
@pytest.mark.parametrize("operator", [True, False])
@pytest.mark.parametrize("enabled", [True, False, "auto"])
def test_each_monitoring_object_is_on_off_or_as_the_cluster_is(
    kind: str, operator: bool, enabled: bool | str
) -> None:
    documents = render(
        {"mode": "serve", "monitoring": {kind: {"enabled": enabled}}}, operator=operator
    )

    wanted = operator if enabled == "auto" else enabled
    assert bool(of_kind(documents, kind[0].upper() + kind[1:])) is wanted


def test_without_the_operator_nothing_of_its_is_rendered() -> None:
    """Or the installation ends with `no matches for kind`."""
    for mode in ("benchmark", "serve"):
        documents = render({"mode": mode}, operator=False)
        assert not [each for each in documents if "monitoring.coreos.com" in each["apiVersion"]]


def test_the_chart_has_the_version_of_what_it_deploys() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["appVersion"] == __version__
    assert container(render(), "gc-sidecar")["image"].endswith(f":{__version__}")


def test_the_readme_says_what_the_values_say() -> None:
    assert (CHART / "README.md").read_text() == chart_readme.generated(), "make chart writes it"


def test_every_value_is_in_the_readme() -> None:
    rows = re.findall(r"^\| `([\w.]+)`", (CHART / "README.md").read_text(), re.MULTILINE)

    def leaves(node: Any, path: str = "") -> list[str]:
        if not isinstance(node, dict) or not node:
            return [path]
        return [
            leaf
            for key, value in node.items()
            for leaf in leaves(value, f"{path}.{key}".lstrip("."))
        ]

    missing = [
        leaf
        for leaf in leaves(yaml.safe_load((CHART / "values.yaml").read_text()))
        if not any(leaf == row or leaf.startswith(f"{row}.") for row in rows)
    ]
    assert missing == []


def examples() -> list[str]:
    """The indented blocks of the README that are values."""
    text = (CHART / "README.md").read_text()
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks if not re.match(r" +(helm|--set)\b", block)]


@pytest.mark.parametrize("example", examples())
def test_the_readme_s_examples_can_be_rendered(example: str) -> None:
    assert render(yaml.safe_load(example), kubernetes="1.37")


def test_the_readme_has_examples() -> None:
    assert len(examples()) >= 2


def test_the_readme_s_flags_can_be_set() -> None:
    flags = re.findall(r"--set ([\w.]+)=(\S+)", (CHART / "README.md").read_text())
    assert flags
    settings = [f"{path}={value.rstrip('`:,')}" for path, value in flags]
    values = [word for setting in settings for word in ("--set", setting)]

    result = helm("helm4", *arguments("template"), *values)

    assert result.returncode == 0, result.stderr


def test_a_pod_monitor_gives_way_to_a_service_monitor() -> None:
    """With both, every sum would count twice."""
    values = {"mode": "serve", "monitoring": {"serviceMonitor": {"enabled": True}}}

    assert of_kind(render(values), "ServiceMonitor")
    assert not of_kind(render(values), "PodMonitor")
    assert of_kind(render({"mode": "serve"}), "PodMonitor")


# --- what is said after an installation ---


def notes(values: dict[str, Any] | None = None, *, operator: bool = False) -> str:
    """NOTES.txt, as a dry run of an installation shows it."""
    given = [word for word in arguments("install", operator=operator)]
    # Without a cluster there is no API to ask for versions: what a dry run assumes is recent enough.
    for option in ("--kube-version", "--api-versions"):
        if option in given:
            at = given.index(option)
            del given[at : at + 2]
    result = helm("helm4", *given, "--dry-run=client", values=values)
    assert result.returncode == 0, result.stderr
    return result.stdout.partition("NOTES:")[2]


def test_the_notes_name_the_job_and_how_to_follow_it() -> None:
    text = notes()

    job = workload(render())["metadata"]["name"]
    assert f"kubectl -n bench logs -f job/{job} -c benchmark" in text
    assert "123 not clean" in text


def test_the_notes_say_what_was_not_rendered_and_why() -> None:
    text = notes()

    assert re.search(r"PodMonitor +no monitoring.coreos.com/v1 in this cluster", text)
    assert re.search(r"ServiceMonitor +a benchmark has no Service", text)
    assert re.search(r"PrometheusRule +monitoring.prometheusRule.enabled is false", text)
    assert re.search(r"dashboards +monitoring.dashboards.enabled is false", text)
    assert "NetworkPolicy" not in text
    off = notes(
        {"networkPolicy": {"enabled": False}, "monitoring": {"podMonitor": {"enabled": False}}}
    )
    assert re.search(r"NetworkPolicy +networkPolicy.enabled is false", off)
    assert re.search(r"PodMonitor +monitoring.podMonitor.enabled is false", off)


def test_the_notes_name_nothing_as_missing_that_is_there() -> None:
    everything: Document = {
        "mode": "serve",
        "monitoring": {
            "podMonitor": {"enabled": False},
            "serviceMonitor": {"enabled": True},
            "prometheusRule": {"enabled": True},
            "dashboards": {"enabled": True},
        },
    }
    text = notes(everything)

    for name in (
        "ServiceMonitor ",
        "PrometheusRule ",
        "dashboards ",
        "NetworkPolicy ",
    ):
        assert f"  {name}" not in text


def test_the_notes_say_where_results_go_and_what_does_not_stay() -> None:
    assert "The report is the end of the log" in notes()
    assert "every pod downloads Qwen/Qwen3-8B anew" in notes()
    kept = notes(
        {
            "benchmark": {"results": {"existingClaim": "r"}},
            "vllm": {"cache": {"existingClaim": "m"}},
        }
    )
    assert "PersistentVolumeClaim r, directory bench-gc-sidecar-1" in kept
    assert "downloads" not in kept


def test_the_notes_of_a_run_that_only_observes_name_the_next_step() -> None:
    assert "benchmark.policy: freeze" in notes({"benchmark": {"policy": "off"}})
