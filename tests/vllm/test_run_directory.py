"""A real vLLM never starts or serves worse for its run directory, and the sidecar says why it cannot see."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sidecar_process import SidecarProcess, wait_for
from tests.vllm.scene import Scene, scene


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A memory volume that has room for three pages. Needs root, as CI has."""
    directory = tmp_path / "run"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=320k", "tmpfs", directory], check=True)
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)


def fill(file: Path) -> None:
    """Write until there is no space left."""
    with file.open("ab", buffering=0) as out, contextlib.suppress(OSError):
        while True:
            out.write(b"x" * 512)


def reasons(sidecar: SidecarProcess) -> str:
    """Everything that the status and the readiness say about not seeing."""
    return str(sidecar.status()) + str(sidecar.get("/readyz")[1])


def assert_starts_and_says(running: Scene, words: str) -> None:
    running.assert_serves()
    with running.sidecar("faults") as sidecar:
        wait_for(f"{words!r} is told: {reasons(sidecar)}", lambda: words in reasons(sidecar))
        # What it cannot see it can still control, over RPC.
        code, body = sidecar.post("/gc/freeze")
        assert code == 200, body
        assert sidecar.post("/gc/restore")[0] == 200
    running.assert_serves()
    running.assert_log_is_quiet()


def test_a_missing_run_directory(tmp_path: Path, tiny_model: Path) -> None:
    with scene(
        tmp_path, tiny_model, endpoint=False, dev_mode=True, run_dir=tmp_path / "nowhere"
    ) as running:
        assert_starts_and_says(running, "does not exist")


def test_a_read_only_run_directory(tmp_path: Path, tiny_model: Path, small_tmpfs: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_tmpfs], check=True)
    with scene(tmp_path, tiny_model, endpoint=False, dev_mode=True, run_dir=small_tmpfs) as running:
        assert_starts_and_says(running, "Read-only file system")


def test_a_run_directory_that_is_full_at_the_start_and_again_later(
    tmp_path: Path, tiny_model: Path, small_tmpfs: Path
) -> None:
    ballast = small_tmpfs / "ballast"
    fill(ballast)
    with scene(tmp_path, tiny_model, endpoint=False, dev_mode=True, run_dir=small_tmpfs) as running:
        assert_starts_and_says(running, "No space left")
        ballast.unlink()
        with running.sidecar("after") as sidecar:
            wait_for(
                "the agents make their pages once there is room",
                lambda: len(list(small_tmpfs.glob("*.page"))) == 3,
                deadline_s=15,
            )
            sidecar.wait_for_coverage(3)
            # Full again while it runs: the pages have their space already.
            fill(ballast)
            running.engine.stream_completions(4)
            code, body = sidecar.post("/gc/freeze")
            assert code == 200, body
            assert sidecar.post("/gc/restore")[0] == 200
        running.assert_serves()
        running.assert_log_is_quiet()
