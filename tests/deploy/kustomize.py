"""Builds what lies in deploy/ with a real kubectl."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

from scripts.get_helm import find_tool
from tests.leaving_out import leave_out

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
COMPONENT = DEPLOY / "kustomize" / "component"
EXAMPLE = DEPLOY / "kustomize" / "example"

Document = dict[str, Any]


def kubectl() -> Path:
    """The program."""
    program = find_tool("kubectl")
    if program is None:
        leave_out("there is no kubectl: python scripts/get_helm.py")
    return program


def try_to_build(directory: Path) -> subprocess.CompletedProcess[str]:
    """`kubectl kustomize`, whatever comes of it."""
    return subprocess.run(
        [str(kubectl()), "kustomize", str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": os.defpath, "HOME": "/nonexistent"},
    )


def build(directory: Path) -> list[Document]:
    """The objects of a kustomization."""
    result = try_to_build(directory)
    assert result.returncode == 0, result.stderr
    return documents(result.stdout)


def documents(text: str) -> list[Document]:
    """The objects of a YAML file."""
    return [document for document in yaml.safe_load_all(text) if document]


def pod_of(objects: list[Document]) -> Document:
    """The pod's spec of the one workload among them."""
    (workload,) = (o for o in objects if o["kind"] in ("Deployment", "StatefulSet", "Job"))
    spec: Document = workload["spec"]["template"]["spec"]
    return spec
