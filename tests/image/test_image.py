"""What the image holds, and what it can do without."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.image.containers import IMAGE, PODMAN, REPOSITORY, RUN, podman
from tests.sidecar_process import wait_for

HARDENED = ["--network=none", "--read-only", "--read-only-tmpfs=false", "--cap-drop=all"]


@pytest.fixture(scope="module")
def config(image: str) -> dict[str, Any]:
    """The image's configuration, as `podman image inspect` shows it."""
    found: dict[str, Any] = json.loads(podman("image", "inspect", image))[0]["Config"]
    return found


def run(
    image: str, *arguments: str, flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [*PODMAN, *RUN, "--no-healthcheck", "--rm", *HARDENED, *flags, image, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_it_serves_unless_told_otherwise_and_as_no_user_with_a_name(config: dict[str, Any]) -> None:
    assert (config["Entrypoint"], config["Cmd"]) == (["gc-sidecar"], ["serve"])
    # A number: Kubernetes cannot tell that a name is not root.
    assert config["User"] == "65532:65532"


def test_it_says_what_it_is_and_which_commit_it_was_built_from(config: dict[str, Any]) -> None:
    labels = {
        name.removeprefix("org.opencontainers.image."): value
        for name, value in config["Labels"].items()
    }
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    ).stdout.strip()
    assert labels["title"] == "gc-sidecar"
    assert labels["version"] == "0.1.0"
    assert labels["revision"] == (revision or "unknown")
    assert labels["licenses"] == "Apache-2.0"
    assert labels["created"].endswith("Z")


@pytest.mark.parametrize("user", ["65532:65532", "0:0", "1000710000:0"])
def test_it_runs_as_any_user_on_a_root_that_nobody_can_write(image: str, user: str) -> None:
    done = run(image, "--version", flags=("--user", user))
    assert (done.returncode, done.stdout) == (0, "gc-sidecar 0.1.0\n"), done.stderr


def test_it_has_nothing_to_install_or_to_compile_with(image: str) -> None:
    look = (
        "import importlib.util, shutil, sys; "
        "sys.exit(repr([t for t in ('gcc', 'cc', 'make', 'pip', 'pip3', 'git') if shutil.which(t)]"
        " + [m for m in ('pip', 'ensurepip') if importlib.util.find_spec(m)]))"
    )
    for python in ("/app/bin/python3", "/usr/bin/python3"):
        done = run(image, "-c", look, flags=("--entrypoint", python))
        assert done.stderr.strip() == "[]", f"{python}: {done.stderr}"


def test_nothing_of_the_build_machine_is_in_it(image: str) -> None:
    # The mirror that wheels came from was told by a secret.
    history = podman("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    assert "index-url" not in history
    done = run(image, "-c", "test ! -s /etc/pip.conf && test ! -e /src && test ! -e /wheels",
               flags=("--entrypoint", "/bin/sh"))  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_file_of_our_packages_is_in_it(image: str) -> None:
    # Also those that are not Python: setuptools takes only what it is told of.
    listing = "cd /app/lib/python3*/site-packages && find gc_sidecar gc_sidecar_agent -type f"
    done = run(image, "-c", listing, flags=("--entrypoint", "/bin/sh"))
    source = REPOSITORY / "sidecar"
    ours = {
        str(path.relative_to(source))
        for package in ("gc_sidecar", "gc_sidecar_agent")
        for path in (source / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert ours - set(done.stdout.split()) == set()


def test_its_bytecode_is_there_already(image: str) -> None:
    count = "find /app -name '*.pyc' | wc -l; find /app -name '*.py' | wc -l"
    done = run(image, "-c", count, flags=("--entrypoint", "/bin/sh"))
    compiled, sources = map(int, done.stdout.split())
    assert compiled == sources > 500


@pytest.fixture
def sidecar(image: str) -> Iterator[str]:
    """The name of a container that runs the image as it is."""
    name = f"gc-sidecar-{os.getpid()}"
    engine = "GC_SIDECAR_ENGINE_URL=http://localhost:8000"
    podman(*RUN, "--detach", "--name", name, "--env", engine, *HARDENED, image)
    yield name
    podman("rm", "--force", "--ignore", "--time", "0", name)


def is_healthy(container: str) -> bool:
    command = [*PODMAN, "healthcheck", "run", container]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_its_health_check_tells_a_sidecar_that_answers_from_one_that_does_not(sidecar: str) -> None:
    wait_for("the sidecar is healthy", lambda: is_healthy(sidecar))
    # On another port nobody answers.
    test = json.loads(podman("image", "inspect", IMAGE))[0]["Healthcheck"]["Test"]
    command = [*PODMAN, "exec", "--env", "GC_SIDECAR_PORT=9999", sidecar, *test[1:]]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_a_sidecar_as_the_first_process_ends_when_it_is_asked_to(sidecar: str) -> None:
    wait_for("the sidecar is healthy", lambda: is_healthy(sidecar))
    podman("kill", "--signal", "TERM", sidecar)
    assert podman("wait", sidecar, timeout_s=10).strip() == "0"
