"""A real vLLM with the agent injected, the probe beside it, and the ways in which tests look at both."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gc_sidecar.install import install_agent
from tests.sidecar_process import SidecarProcess, wait_for
from tests.vllm.probe import PLUGIN_NAME, Probe, install_probe, probe_environment
from tests.vllm.real_vllm import RealVllm

GC_STATE = """
import gc
result = {"enabled": gc.isenabled(), "threshold": list(gc.get_threshold()),
          "frozen": gc.get_freeze_count() > 0}
"""

HELD_OFF = 1 << 30


@dataclass
class Scene:
    """An engine that runs, with what tests need to look at it."""

    engine: RealVllm
    probe: Probe
    run_dir: Path | None
    directory: Path

    @contextlib.contextmanager
    def sidecar(
        self, name: str, *args: str, engine: bool = True, run_dir: bool = True
    ) -> Iterator[SidecarProcess]:
        """A sidecar for this engine; without `engine` it knows only the run directory."""
        with SidecarProcess(
            engine_urls=[self.engine.url] if engine else [],
            run_dir=self.run_dir if run_dir else None,
            extra_args=args,
            log_path=self.directory / f"sidecar-{name}.log",
        ) as sidecar:
            yield sidecar

    def gc_state(self, pids: Mapping[str, int]) -> dict[str, Any]:
        """GC's true state in each process, as the probe sees it."""
        return self.probe.run(GC_STATE, pids)

    def assert_serves(self) -> None:
        """vLLM answers a completion."""
        assert self.engine.complete("hello", max_tokens=4)

    def assert_log_is_quiet(self) -> None:
        """Nothing of ours in vLLM's log above INFO."""
        ours = re.compile(r"gc[-_]sidecar", re.IGNORECASE)
        loud = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|Traceback|Exception ignored")
        lines = self.engine.log_text().splitlines()
        bad = [line for line in lines if loud.search(line) and ours.search(line)]
        assert not bad, "\n".join(bad)
        traced = [line for line in lines if "gc_sidecar_agent/" in line and "File " in line]
        assert not traced, "\n".join(traced)


@contextlib.contextmanager
def scene(
    directory: Path,
    model: Path,
    *,
    endpoint: bool = True,
    plugin: bool = True,
    run_dir: Path | str | None = "new",
    env: Mapping[str, str] | None = None,
    extra_args: Sequence[str] = (),
    python_path: Sequence[Path] = (),
    **engine_options: Any,
) -> Iterator[Scene]:
    """A real vLLM with our injected tree and the probe on its PYTHONPATH.

    `run_dir`: "new" makes one in shared memory, as a pod's memory volume would be; None leaves it unset.
    Without `plugin`, VLLM_PLUGINS shuts ours out (the tree is there still, for a worker extension).
    """
    inject = directory / "agent"
    install_agent(inject, endpoint)
    probe_tree = directory / "probe-tree"
    install_probe(probe_tree)
    probe = Probe(directory / "probe")
    plugins = [PLUGIN_NAME, *(["gc_sidecar"] if plugin else [])]
    with contextlib.ExitStack() as stack:
        if run_dir == "new":
            shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=shared)))
        assert run_dir is None or isinstance(run_dir, Path)
        variables = {
            **probe_environment(probe.directory),
            **(env or {}),
            "PYTHONPATH": os.pathsep.join(map(os.fspath, [probe_tree, *python_path])),
        }
        engine = stack.enter_context(
            RealVllm(
                inject_dir=inject,
                run_dir=run_dir,
                plugins=",".join(plugins),
                model=model,
                extra_env=variables,
                extra_args=extra_args,
                log_path=directory / "vllm.log",
                **engine_options,
            )
        )
        yield Scene(engine, probe, run_dir, directory)


def pids_of(status: Mapping[str, Any]) -> dict[str, int]:
    """The processes of a status by a name like `worker-0-1` (role, dp rank, rank)."""
    return {
        f"{row['role']}-{row['dp_rank']}-{row['rank']}": row["pid"]
        for row in status["processes"]
        if row["pid"] is not None
    }


def rows_of(status: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of a status by the same names."""
    return {f"{row['role']}-{row['dp_rank']}-{row['rank']}": row for row in status["processes"]}


def gen2_counts(status: Mapping[str, Any]) -> dict[str, int]:
    """How many full collections each process has had."""
    return {name: row["pauses"]["gen2"]["count"] for name, row in rows_of(status).items()}


def freeze_maintain_restore(running: Scene, sidecar: SidecarProcess, names: set[str]) -> None:
    """The three operations, each acknowledged by all of `names`, and the engine as it was."""
    pids = pids_of(sidecar.wait_for_coverage(len(names)))
    assert set(pids) == names
    before = running.gc_state(pids)

    code, body = sidecar.post("/gc/freeze")
    assert code == 200, body
    assert set(rows_of(body["operation"])) == names
    assert all(state["threshold"][2] == HELD_OFF for state in running.gc_state(pids).values())
    running.assert_serves()

    counts = gen2_counts(sidecar.status())
    code, body = sidecar.post("/gc/maintain")
    assert code == 200, body
    assert set(rows_of(body["operation"])) == names
    assert all(row["ok"] and row["pause_s"] > 0 for row in body["operation"]["processes"])
    assert gen2_counts(sidecar.status()) == {name: count + 1 for name, count in counts.items()}
    running.assert_serves()

    code, body = sidecar.post("/gc/restore")
    assert code == 200, body
    wait_for(
        "no collection is pending",
        lambda: not any(row["collect_pending"] for row in sidecar.status()["processes"]),
    )
    assert running.gc_state(pids) == before
    running.assert_serves()
    running.assert_log_is_quiet()
