"""Run the agent's unit tests on every CPython of this machine, with nothing but pytest and pytest-xdist beside.

The agent runs in the engine's interpreter, whichever that is; `make test-agent` calls this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TESTS = "tests/unit/agent"
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.15")
# In CI a run without one of these proves nothing.
REQUIRED_IN_CI = ("3.11", "3.12", "3.13")


def is_version(python: Path, version: str) -> bool:
    """Whether `python` runs and is that CPython: a pyenv shim stands on PATH for versions that are
    not switched on, and only says so."""
    code = "import sys; print('%s %d.%d' % ((sys.implementation.name,) + sys.version_info[:2]))"
    result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return result.returncode == 0 and result.stdout.strip() == f"cpython {version}"


def pyenv_versions() -> list[Path]:
    """The interpreters' directories of pyenv, newest first; none where there is no pyenv."""
    if shutil.which("pyenv") is None:
        return []
    result = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True)
    found = list(Path(result.stdout.strip(), "versions").iterdir())
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def find_python(version: str) -> Path | None:
    on_path = shutil.which(f"python{version}")
    candidates = [Path(on_path)] if on_path else []
    candidates += [
        path / "bin" / f"python{version}"
        for path in pyenv_versions()
        if path.name.startswith(f"{version}.")
    ]
    for candidate in candidates:
        if candidate.exists() and is_version(candidate, version):
            return candidate
    return None


def environment_for(version: str, python: Path) -> Path:
    """The interpreter of an environment under .venv with pytest and pytest-xdist, made if missing."""
    environment = REPOSITORY / ".venv" / f"py{version.replace('.', '')}"
    in_it = environment / "bin" / "python"
    stamp = environment / ".installed"
    if not stamp.exists():
        subprocess.run([python, "-m", "venv", "--clear", environment], check=True)
        install = [
            str(in_it),
            "-m",
            "pip",
            "install",
            "-qq",
            "--disable-pip-version-check",
            "pytest",
            "pytest-xdist",
        ]
        subprocess.run(install, check=True)
        stamp.touch()
    return in_it


def run_tests(version: str, python: Path) -> bool:
    command = [
        *(str(environment_for(version, python)), "-m", "pytest", TESTS, "--quiet"),
        # Only what lies with these tests: the other conftest files may import what is not here.
        f"--confcutdir={TESTS}",
        f"--numprocesses={max(4, os.cpu_count() or 1)}",
        *("-p", "no:cacheprovider"),
        f"--junitxml=build/junit-agent-{version}.xml",
    ]
    # For the processes that tests start: pytest's own `pythonpath` reaches only itself.
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY / "sidecar")}
    return subprocess.run(command, cwd=REPOSITORY, env=env, check=False).returncode == 0


def main() -> None:
    failed, ran = [], []
    for version in VERSIONS:
        (REPOSITORY / "build" / f"junit-agent-{version}.xml").unlink(missing_ok=True)
        python = find_python(version)
        if python is None:
            print(f"==> CPython {version}: not on this machine, agent NOT TESTED on it", flush=True)
            continue
        print(f"==> CPython {version}: the agent's unit tests", flush=True)
        ran.append(version)
        if not run_tests(version, python):
            failed.append(version)
    if failed:
        sys.exit(f"the agent's unit tests failed on CPython {', '.join(failed)}")
    if not ran:
        sys.exit("no CPython 3.10 or later was found: the agent was not tested")
    missing = [version for version in REQUIRED_IN_CI if version not in ran]
    if os.environ.get("CI") and missing:
        sys.exit(f"CI needs CPython {', '.join(missing)}, which this machine does not have")


if __name__ == "__main__":
    main()
