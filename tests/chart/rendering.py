"""Renders the chart with real Helms, each (values, version) once, and asks the judges about what comes out."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from scripts.get_helm import TOOLS, find_tool
from tests.leaving_out import leave_out

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "helm" / "gc-sidecar"
JUDGES = TOOLS / "chart" / "bin"
OPERATOR = "monitoring.coreos.com/v1"
HELMS = ("helm4", "helm3")
# The oldest that a benchmark runs on, one in the middle, the newest whose schemas there are.
KUBERNETES = ("1.29", "1.33", "1.37")
PRESETS = ("b200-dp4", "b200-tp8", "gb200", "cpu")
DEADLINE_S = 60.0

# libyaml's loader, where PyYAML has it: ten times as fast.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Document = dict[str, Any]
Values = Mapping[str, Any]


def helm(
    name: str, *arguments: str, values: Values | None = None
) -> subprocess.CompletedProcess[str]:
    """A real Helm, run to its end, `values` on its standard input."""
    program = find_tool(name)
    if program is None:
        leave_out(f"there is no {name}: python scripts/get_helm.py")
    given = [] if values is None else ["--values", "-"]
    return subprocess.run(
        [str(program), *arguments, *given],
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        # Nothing of this machine's: no cluster, no settings, no plugins.
        env={"PATH": os.defpath, "HOME": "/nonexistent"},
    )


def judge(name: str) -> str:
    """The path of a program in .venv/tools/chart."""
    program = JUDGES / name
    if not os.access(program, os.X_OK):
        leave_out(f"there is no {program}: make .venv/tools/chart/.installed")
    return str(program)


def arguments(
    command: str,
    *,
    preset: str = "",
    kubernetes: str = "1.33",
    operator: bool = True,
    release: str = "bench",
) -> list[str]:
    found = [command, *([release] if command != "lint" else []), str(CHART), "--namespace", "bench"]
    found += ["--kube-version", kubernetes]
    if preset:
        found += ["--values", str(CHART / f"values-{preset}.yaml")]
    if operator and command != "lint":
        found += ["--api-versions", OPERATOR]
    return found


def template(
    values: Values | None = None, name: str = "helm4", **options: Any
) -> subprocess.CompletedProcess[str]:
    """`helm template`, whatever comes of it. Options: preset, kubernetes, operator, release."""
    return helm(name, *arguments("template", **options), values=values)


@functools.cache
def _rendered(values: str, name: str, options: str) -> str:
    result = template(json.loads(values), name, **json.loads(options))
    assert result.returncode == 0, result.stderr
    return result.stdout


def render_text(values: Values | None = None, name: str = "helm4", **options: Any) -> str:
    """What Helm renders, as it is; once for each question."""
    return _rendered(
        json.dumps(values or {}, sort_keys=True), name, json.dumps(options, sort_keys=True)
    )


@functools.cache
def _parsed(text: str) -> str:
    return json.dumps([each for each in yaml.load_all(text, LOADER) if each])


def render(values: Values | None = None, name: str = "helm4", **options: Any) -> list[Document]:
    """The same as objects, the caller's to change."""
    documents: list[Document] = json.loads(_parsed(render_text(values, name, **options)))
    return documents


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document["kind"] in kinds]


def workload(documents: list[Document]) -> Document:
    """The one Job or Deployment."""
    (found,) = of_kind(documents, "Job", "Deployment")
    return found


def pod(documents: list[Document]) -> Document:
    """The pod's spec."""
    spec: Document = workload(documents)["spec"]["template"]["spec"]
    return spec


def containers(spec: Document) -> Iterator[Document]:
    """All containers of a pod, in the order in which they start."""
    yield from spec.get("initContainers", [])
    yield from spec["containers"]


def container(documents: list[Document], name: str) -> Document:
    (found,) = (each for each in containers(pod(documents)) if each["name"] == name)
    return found


def environment(each: Document) -> dict[str, Any]:
    """The variables of a container; one that is read from elsewhere is a dict."""
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in each.get("env", [])}


class Judge:
    """`judge.py` in its own environment: one process for all questions of a test process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def complaints(self, documents: list[Document], kubernetes: str) -> list[str]:
        """What is wrong with `documents` on that Kubernetes."""
        if self._process is None:
            self._process = subprocess.Popen(
                [judge("python"), str(Path(__file__).with_name("judge.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps({"kubernetes": kubernetes, "documents": documents}),
            file=self._process.stdin,
            flush=True,
        )
        answer: list[str] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """It ends when nobody asks any more."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=DEADLINE_S)
