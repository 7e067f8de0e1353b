"""What the chart renders is valid, the same each time, and the same by every Helm."""

from __future__ import annotations

import copy
import json
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.chart.cases import BY_NAME, CASES, SERVED, Case
from tests.chart.golden_files import golden
from tests.chart.rendering import (
    CHART,
    HELMS,
    KUBERNETES,
    PRESETS,
    Judge,
    arguments,
    helm,
    of_kind,
    pod,
    render,
    render_text,
    template,
    workload,
)

OLDER = ("1.25", "1.28")


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


EACH = [
    pytest.param(case, kubernetes, id=f"{case}-{kubernetes}")
    for case in CASES
    for kubernetes in (*OLDER, *KUBERNETES)
    if version(kubernetes) >= version(case.since)
]


@pytest.mark.parametrize(("case", "kubernetes"), EACH)
def test_every_object_is_valid_by_the_schemas_of_its_kubernetes(
    case: Case, kubernetes: str, judge: Judge
) -> None:
    documents = case.render(kubernetes=kubernetes)

    assert documents
    assert judge.complaints(documents, kubernetes) == []


def test_the_judges_find_what_is_wrong(judge: Judge) -> None:
    """Or all that stands above would prove nothing."""
    good = BY_NAME["everything monitored"].render()
    for kind, field in (
        ("Job", "backofLimit"),
        ("PodMonitor", "endpoints"),
        ("PrometheusRule", "rules"),
    ):
        broken = copy.deepcopy(good)
        of_kind(broken, kind)[0]["spec"][field] = 1

        assert len(judge.complaints(broken, "1.33")) == 1
    unknown = copy.deepcopy(good)
    unknown[0]["kind"] = "NetworkPolitics"

    assert len(judge.complaints(unknown, "1.33")) == 1


@pytest.mark.parametrize("name", HELMS)
@pytest.mark.parametrize("preset", ["", *PRESETS])
def test_lint_finds_nothing(name: str, preset: str) -> None:
    result = helm(name, *arguments("lint", preset=preset), "--strict")

    assert result.returncode == 0, result.stdout
    assert "[WARNING]" not in result.stdout
    assert "[ERROR]" not in result.stdout


@pytest.mark.parametrize("name", HELMS)
def test_lint_finds_nothing_where_it_serves(name: str) -> None:
    result = helm(name, *arguments("lint"), "--strict", values={"mode": "serve"})

    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_older_helm_renders_the_same(case: Case) -> None:
    def by_name(name: str) -> list[str]:
        return sorted(json.dumps(each, sort_keys=True) for each in case.render(name=name))

    assert by_name("helm3") == by_name("helm4")


@pytest.mark.parametrize("name", HELMS)
@pytest.mark.parametrize("case", ["everything", "serve with everything", "everything monitored"])
def test_two_renderings_are_identical(case: str, name: str) -> None:
    """Nothing is random, nothing is looked up: Argo CD would see a difference at each look."""
    values = BY_NAME[case].values

    assert (
        template(values, name).stdout == template(values, name).stdout == render_text(values, name)
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_renders_its_golden_file(preset: str) -> None:
    assert render_text(preset=preset) == golden(preset).read_text(), "make chart writes it anew"


def test_there_is_a_golden_file_for_each_preset_and_no_other() -> None:
    assert {path.stem for path in golden("cpu").parent.iterdir()} == set(PRESETS)
    assert {f"values-{preset}.yaml" for preset in PRESETS} == {
        path.name for path in CHART.glob("values-*.yaml")
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_says_nothing_that_the_defaults_say_already(preset: str) -> None:
    """What repeats a default hides a change of it. The mode is said, for it is what a preset is for."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    own = yaml.safe_load((CHART / f"values-{preset}.yaml").read_text())

    def repeated(ours: dict[str, object], default: object, path: str = "") -> list[str]:
        found = []
        for key, value in ours.items():
            other = default.get(key) if isinstance(default, dict) else None
            if isinstance(value, dict) and isinstance(other, dict) and other:
                found += repeated(value, other, f"{path}{key}.")
            elif value == other:
                found.append(f"{path}{key}")
        return found

    allowed = {"mode", "vllm.image.tag", "sidecar.resources.memory"}
    assert set(repeated(own, defaults)) <= allowed


@pytest.mark.parametrize("name", HELMS)
def test_a_packaged_chart_renders_the_same(name: str, tmp_path: Path) -> None:
    """What .helmignore leaves out is needed by nobody."""
    packed = helm(name, "package", str(CHART), "--destination", str(tmp_path))
    assert packed.returncode == 0, packed.stderr
    (archive,) = tmp_path.iterdir()
    with tarfile.open(archive) as files:
        names = [member.removeprefix("gc-sidecar/") for member in files.getnames()]
    assert {"README.md", "values.schema.json", "rules/gc-sidecar.rules.yaml"} <= set(names)
    assert not [member for member in names if member.startswith(".") and member != ".helmignore"]

    values = BY_NAME["everything monitored"].values
    command = [str(archive) if word == str(CHART) else word for word in arguments("template")]
    assert helm(name, *command, values=values).stdout == render_text(values, name)


@pytest.mark.parametrize("kubernetes", ["1.25", "1.28", "1.28.15-gke.100"])
@pytest.mark.parametrize("name", HELMS)
def test_a_benchmark_is_refused_below_1_29_with_the_reason(name: str, kubernetes: str) -> None:
    result = template({}, name, kubernetes=kubernetes)

    assert result.returncode != 0
    assert "mode: benchmark needs Kubernetes 1.29 or later" in result.stderr
    assert "native sidecars" in result.stderr


@pytest.mark.parametrize("kubernetes", ["1.29.0-eks-1234", "v1.31.2-gke.500"])
def test_a_provider_s_version_counts_as_its_release(kubernetes: str) -> None:
    assert workload(render(kubernetes=kubernetes))["kind"] == "Job"


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_below_1_29_the_sidecar_of_a_served_engine_is_a_container_like_others(case: Case) -> None:
    spec = pod(case.render(kubernetes="1.28"))

    assert "gc-sidecar" in [each["name"] for each in spec["containers"]]
    assert not [each for each in spec["initContainers"] if "restartPolicy" in each]


def test_a_kubernetes_that_no_mode_knows_is_refused() -> None:
    result = template({"mode": "serve"}, kubernetes="1.24")

    assert result.returncode != 0
    assert "1.25.0" in result.stderr


@pytest.mark.parametrize("mode", ["benchmark", "serve"])
def test_the_longest_release_name_still_makes_valid_names(mode: str, judge: Judge) -> None:
    documents = render({"mode": mode, **MONITORED}, release="b" * 53)

    assert judge.complaints(documents, "1.33") == []
    for document in documents:
        metadata = document["metadata"]
        assert len(metadata["name"]) <= 63
        assert not [label for label in metadata["labels"].values() if len(label) > 63]


MONITORED = {"monitoring": {"dashboards": {"enabled": True}, "prometheusRule": {"enabled": True}}}
