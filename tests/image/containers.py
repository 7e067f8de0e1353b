"""The real container tools: the image is built from the Dockerfile and run, by buildah and podman as root.

No registry is asked. The base image is a local stand-in, which scripts/stand_in_base_image.sh makes of this
machine's own Debian packages: it is not python:slim, and what those two differ in is not tested here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = ("buildah", "podman", "mmdebstrap")
STAND_IN_BASE = "localhost/gc-sidecar-stand-in-base:latest"
IMAGE = "localhost/gc-sidecar:tested"

PODMAN = ["podman"]
if shutil.which("runc"):
    PODMAN += ["--runtime", "runc"]
if not Path("/run/systemd/system").is_dir():
    PODMAN += ["--cgroup-manager", "cgroupfs"]
# Its own default is more than may be asked for inside of a container. And health checks would need systemd.
RUN = ("run", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024")


def why_not() -> str | None:
    """What this machine lacks to build and run an image; None where it lacks nothing."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} here: apt-get install buildah podman runc mmdebstrap"
    if os.geteuid() != 0:
        return "these containers have different users, for which podman must be root's here"
    return None


def podman(*arguments: str, check: bool = True, timeout_s: float = 120.0) -> str:
    """What podman prints; an AssertionError with what it says where it fails."""
    done = subprocess.run(
        [*PODMAN, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert not check or done.returncode == 0, (
        f"podman {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done.stdout


def build(directory: Path) -> None:
    """The image IMAGE, by `make image`'s own script; `directory` takes what is needed meanwhile."""
    if subprocess.run([*PODMAN, "image", "exists", STAND_IN_BASE], check=False).returncode != 0:
        _run([str(REPOSITORY / "scripts" / "stand_in_base_image.sh"), STAND_IN_BASE])
    # The last run's, or each run would leave one without a name behind.
    podman("rmi", "--force", IMAGE, check=False)
    configuration, mounts = _pip_configuration()
    pip_conf = directory / "pip.conf"
    pip_conf.write_text(configuration)
    flags = ["--isolation", "chroot", "--pull-never"]
    flags += [f"--volume={path}:{path}:ro" for path in mounts]
    _run(
        [str(REPOSITORY / "scripts" / "build_image.sh")],
        BUILDER="buildah",
        IMAGE=IMAGE,
        PYTHON_IMAGE=STAND_IN_BASE,
        PIP_CONF=str(pip_conf),
        BUILD_FLAGS=" ".join(flags),
    )


def _pip_configuration() -> tuple[str, list[str]]:
    """What this machine's pip is told, as a file, and the files and directories that it names."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings: dict[str, list[str]] = {}
    # A variable of the environment comes after the files, and wins.
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):
        found = re.fullmatch(r"(?:global|:env:)\.([a-z-]+)='(.*)'", line)
        if found and found[1] not in ("timeout", "disable-pip-version-check"):
            settings[found[1]] = re.split(r"\\n|\s+", found[2])
    lines = ["[global]"]
    for name, values in settings.items():
        lines += [f"{name} = {values[0]}", *(f"  {value}" for value in values[1:])]
    named = {value.removeprefix("file://") for values in settings.values() for value in values}
    paths = {path for path in named if path.startswith("/") and os.path.exists(path)}
    return "\n".join(lines) + "\n", sorted(paths | _neighbours(paths))


def _neighbours(paths: set[str]) -> set[str]:
    """An index on this disk links to files beside it: the directory that holds both."""
    return {os.path.dirname(path) for path in paths if os.path.basename(path) == "simple"}


def _run(command: Sequence[str], **environment: str) -> None:
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{command[0]}: {done.returncode}\n{done.stdout[-6000:]}"
