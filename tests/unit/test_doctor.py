"""doctor beside the engine: each planted fault is found by its check, with a remedy that names what to do, and a
sound set-up gives nothing above ok, in either half.

Pages are those of another process, the engine's HTTP is a stand-in's, the embedded engine's where that matters.
"""

from __future__ import annotations

import json
import os
import socket
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar.__main__ import main
from gc_sidecar.commands import doctor
from gc_sidecar.embedded import ENGINE_NAME
from gc_sidecar.server.secret import ensure_endpoint_token
from gc_sidecar.server.timing import Timing
from gc_sidecar_agent.agent import Topology, this_process
from gc_sidecar_agent.board import BOARD_NAME, Board, Lease, write_board
from gc_sidecar_agent.command import Command
from gc_sidecar_agent.doctor.run_dir_checks import file_system_of
from gc_sidecar_agent.page import list_pages
from tests.embedded.engine import EmbeddedEngine
from tests.sidecar_process import SidecarProcess
from tests.unit.agent.diagnosis import Diagnosis, memory_volume
from tests.unit.agent.own_process import Child, hear, say
from tests.unit.server.stand_in import StandInEngine
from tests.vllm.real_vllm import free_port

NOBODY = 65534


@dataclass
class Pod:
    """A run directory, engines that a test starts, and the flags that doctor gets."""

    run_dir: Path
    scratch: Path
    capsys: pytest.CaptureFixture[str]
    flags: dict[str, str] = field(default_factory=dict)
    engines: list[Any] = field(default_factory=list)

    def start(self, **config: Any) -> StandInEngine:
        """A stand-in engine whose processes have pages here."""
        config.setdefault("run_dir", str(self.run_dir))
        config.setdefault("token_file", str(self.run_dir / "endpoint.token"))
        engine = StandInEngine(**config)
        self.engines.append(engine)
        self.flags["--engine-url"] = engine.url
        return engine

    @property
    def engine(self) -> StandInEngine:
        """The one that was started first."""
        engine: StandInEngine = self.engines[0]
        return engine

    def doctor(self, *arguments: str) -> Diagnosis:
        """What `gc-sidecar doctor` finds."""
        flags = [word for pair in self.flags.items() for word in pair]
        code = main(["doctor", "--json", *flags, *arguments])
        captured = self.capsys.readouterr()
        return Diagnosis(json.loads(captured.out or "{}"), code, captured.err)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with memory_volume() as directory:
        yield directory


@pytest.fixture
def pod(
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Pod]:
    for name in os.environ:
        if name.startswith("GC_SIDECAR_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(doctor, "TIMING", Timing(stale_after_s=0.5, question_s=2.0))
    monkeypatch.setattr(doctor, "LOOK_AGAIN_S", 0.2)
    pod = Pod(run_dir, tmp_path, capsys)
    pod.flags = {"--run-dir": str(run_dir), "--url": f"http://127.0.0.1:{free_port()}"}
    yield pod
    for engine in pod.engines:
        engine.stop()


# --- sound set-ups ---


def test_a_sound_set_up_gives_nothing_above_ok(pod: Pod) -> None:
    pod.start()
    before_the_sidecar = pod.doctor()
    before_the_sidecar.assert_sound()
    assert "once the sidecar" in before_the_sidecar.find("transport", "ok")["reason"]
    ensure_endpoint_token(str(pod.run_dir))
    diagnosis = pod.doctor()
    diagnosis.assert_sound()
    assert {finding["remedy"] for finding in diagnosis.document["findings"]} == {None}
    assert diagnosis.find("transport", "ok")["reason"] == f"plugin at {pod.engine.url}"
    assert pod.engine.calls() == []
    assert set(os.listdir(pod.run_dir)) == {"endpoint.token", *list_pages(str(pod.run_dir))}


def test_both_halves_find_an_embedded_engine_and_its_sidecar_sound(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EmbeddedEngine("--workers=2", run_dir=pod.run_dir, log_path=tmp_path / "engine.log")
    with (
        engine,
        SidecarProcess(
            engine_urls=[engine.url], run_dir=pod.run_dir, log_path=tmp_path / "sidecar.log"
        ) as sidecar,
    ):
        sidecar.wait_for_coverage(4)
        assert sidecar.get("/version")[1]["engines"] == [ENGINE_NAME]
        pod.flags |= {"--engine-url": sidecar.url, "--url": sidecar.url}
        diagnosis = pod.doctor()
        assert {finding["check"] for finding in diagnosis.bad} == {"engine"}
        finding = diagnosis.find("engine", "error")
        assert finding["reason"] == f"{sidecar.url} is a gc-sidecar, not an engine"
        assert "--engine-url" in (finding["remedy"] or "")
        pod.flags |= {"--engine-url": engine.url, "--url": sidecar.url}
        diagnosis = pod.doctor()
        diagnosis.assert_sound()
        assert diagnosis.find("engine", "ok")["reason"] == f"{engine.url} is {ENGINE_NAME}"
        assert "a sidecar answers" in diagnosis.find("listener", "ok")["reason"]
        assert sidecar.post("/gc/freeze", {"owner": "bench-1"})[0] == 200
        diagnosis = pod.doctor()
        diagnosis.assert_sound()
        pid = str(engine.launcher.pid)
        engine_side = pod.doctor("--engine-side", "--pid", pid)
        engine_side.assert_sound()
        assert "4 living" in engine_side.find("pages", "ok")["reason"]
        assert pid in engine_side.find("engine", "ok")["reason"]


def test_the_board_alone_is_sound(pod: Pod) -> None:
    pod.start()
    del pod.flags["--engine-url"]
    diagnosis = pod.doctor()
    diagnosis.assert_sound()
    assert diagnosis.find("transport", "ok")["reason"].startswith("board")


def test_dev_mode_on_loopback_is_sound(pod: Pod, tmp_path: Path) -> None:
    arguments = ["--workers=1", "--dev-mode", "--host=127.0.0.1"]
    with EmbeddedEngine(*arguments, run_dir=pod.run_dir, log_path=tmp_path / "log") as engine:
        pod.flags["--engine-url"] = engine.url
        diagnosis = pod.doctor()
    diagnosis.assert_sound()
    assert "loopback alone" in diagnosis.find("dev_mode", "ok")["reason"]


# --- planted faults ---


@dataclass
class Fault:
    """What is planted beside an engine that runs, the check that has to find it, what its remedy has to name."""

    plant: Callable[[Pod], None]
    check: str
    level: str
    remedy: str
    others: tuple[str, ...] = ()


def write(path: Path, text: str = "") -> None:
    path.write_text(text)


def stop_a_heartbeat(pod: Pod) -> None:
    pod.engine.set_process("worker-0-1", still=True)


def leave_a_dead_page(pod: Pod) -> None:
    pod.engine.restart("worker-0-1")


def end_a_worker(pod: Pod) -> None:
    pod.engine.set_process("worker-0-1", dead=True)


def truncate_a_page(pod: Pod) -> None:
    write(pod.run_dir / "worker-dp0-r7-1700000000-0123abcd.page", "half a page")


def put_a_fifo(pod: Pod) -> None:
    os.mkfifo(pod.run_dir / "worker-dp0-r7-1700000000-0123abcd.page")


def look_elsewhere(pod: Pod) -> None:
    """Both containers have a directory of that name, but not the same one."""
    pod.flags["--run-dir"] = tempfile.mkdtemp(dir=pod.run_dir)
    os.chmod(pod.flags["--run-dir"], 0o2770)


def look_on_a_disk(pod: Pod) -> None:
    where = next((d for d in (pod.scratch, Path("/var/tmp"), Path.home()) if is_disk(d)), None)
    assert where is not None, "this test needs a directory that is not in memory"
    disk = tempfile.TemporaryDirectory(dir=where)
    pod.engines.append(StopLater(disk.cleanup))
    pod.flags["--run-dir"] = disk.name
    os.chmod(disk.name, 0o2770)


def is_disk(directory: Path) -> bool:
    return file_system_of(str(directory)) not in ("tmpfs", "ramfs", None)


def share_with_another_engine(pod: Pod) -> None:
    url = pod.flags["--engine-url"]
    pod.start()
    pod.flags["--engine-url"] = url


def leave_temporary_files(pod: Pod) -> None:
    for name in (".board.json.17.0123abcd.tmp", ".worker-dp0-r0-1700000000-0123abcd.page.tmp"):
        write(pod.run_dir / name)
        long_ago = time.time() - 3600
        os.utime(pod.run_dir / name, (long_ago, long_ago))
    write(pod.run_dir / ".endpoint.token.0123abcd.tmp")  # its writer may still be at it


def leave_a_board(lease_s: float, age_s: float = 3600.0) -> Callable[[Pod], None]:
    def plant(pod: Pod) -> None:
        policy = Command("freeze", "op-1", 7, owner="bench-1", lease_s=3600.0)
        lease = Lease(1, 3600.0, time.time() + lease_s)
        write_board(str(pod.run_dir), Board(policy, None, lease))
        when = time.time() - age_s
        os.utime(pod.run_dir / BOARD_NAME, (when, when))

    return plant


def write_the_board_now(pod: Pod) -> None:
    write_board(str(pod.run_dir), Board())


def damage_the_board(pod: Pod) -> None:
    write(pod.run_dir / BOARD_NAME, "{")
    os.utime(pod.run_dir / BOARD_NAME, (0, 0))


def open_the_token(pod: Pod) -> None:
    (pod.run_dir / "endpoint.token").chmod(0o644)


def empty_the_token(pod: Pod) -> None:
    write(pod.run_dir / "endpoint.token")


def close_the_token(pod: Pod) -> None:
    """The engine runs as another user than the sidecar, and the secret is for its owner alone."""
    if os.geteuid() != 0:
        pytest.fail("this test gives a file to another user: run it as root")
    (pod.run_dir / "endpoint.token").chmod(0o600)
    for name in list_pages(str(pod.run_dir)):
        os.chown(pod.run_dir / name, NOBODY, -1)


def call_an_engine_that_is_not_there(pod: Pod) -> None:
    pod.flags["--engine-url"] = f"http://127.0.0.1:{free_port()}"


def start_and_do_not_answer(pod: Pod) -> None:
    restart_as(processes={"api_server-0-0": {"starting": True}})(pod)
    call_an_engine_that_is_not_there(pod)


def take_the_port(pod: Pod) -> None:
    """By the engine, which has a /version as a sidecar has."""
    pod.flags["--url"] = pod.flags["--engine-url"]


def take_the_port_silently(pod: Pod) -> None:
    """By somebody who accepts and says nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    pod.engines.append(StopLater(listener.close))
    pod.flags["--url"] = f"http://127.0.0.1:{listener.getsockname()[1]}"


@dataclass
class StopLater:
    """Something to end with the engines."""

    stop: Callable[[], None]


def set_engine(**behaviour: Any) -> Callable[[Pod], None]:
    return lambda pod: pod.engine.set(**behaviour)


def restart_as(**config: Any) -> Callable[[Pod], None]:
    def plant(pod: Pod) -> None:
        pod.engine.stop()
        for name in list_pages(str(pod.run_dir)):
            os.unlink(pod.run_dir / name)
        pod.start(**config)

    return plant


def refuse_a_policy(pod: Pod) -> None:
    pod.engine.set_process("worker-0-1", refuse={"code": "told_to", "kinds": ["freeze"]})
    leave_a_board(3600.0)(pod)
    time.sleep(0.3)
    os.unlink(pod.run_dir / BOARD_NAME)


FAULTS = {
    "the run directory is missing": Fault(
        lambda pod: pod.flags.update({"--run-dir": "/nowhere/run"}),
        "run_dir",
        "error",
        "install -d -m 2770 /nowhere/run",
        ("transport",),
    ),
    "no run directory is named": Fault(
        lambda pod: pod.flags.__delitem__("--run-dir"),
        "run_dir",
        "warning",
        "--run-dir DIR and GC_SIDECAR_RUN_DIR=DIR",
        ("transport",),
    ),
    "the run directory is on disk": Fault(
        look_on_a_disk, "run_dir_memory", "warning", "medium: Memory", ("pages",)
    ),
    "the run directory is not setgid": Fault(
        lambda pod: pod.run_dir.chmod(0o777), "run_dir_mode", "warning", "fsGroup"
    ),
    "the run directory is not shared": Fault(look_elsewhere, "pages", "error", "mount one volume"),
    "two engines share a run directory": Fault(
        share_with_another_engine, "pages", "error", "of its own"
    ),
    "a process has no page": Fault(
        restart_as(processes={"worker-0-1": {"page_error": "told to"}}),
        "coverage",
        "error",
        "bin/with-agent",
    ),
    "a worker has ended": Fault(end_a_worker, "coverage", "error", "with-agent", ("pages_dead",)),
    "the engine is starting": Fault(
        restart_as(processes={"worker-0-1": {"starting": True}}), "coverage", "warning", "wait"
    ),
    "a heartbeat stands still": Fault(
        stop_a_heartbeat, "pages_stale", "warning", "restart the engine"
    ),
    "a page is left over": Fault(leave_a_dead_page, "pages_dead", "warning", "rm /dev/shm/"),
    "a page is truncated": Fault(truncate_a_page, "pages_unreadable", "warning", "rm /dev/shm/"),
    "a page is a FIFO": Fault(put_a_fifo, "pages_unreadable", "warning", "rm /dev/shm/"),
    "a policy was refused": Fault(refuse_a_policy, "agents", "warning", "do what the reason says"),
    "temporary files are left over": Fault(
        leave_temporary_files, "temporary_files", "warning", "rm /dev/shm/"
    ),
    "a policy whose lease has ended is left over": Fault(
        leave_a_board(-60.0), "board", "warning", "start the sidecar, which tidies up"
    ),
    "a policy is in force and no sidecar": Fault(
        leave_a_board(600.0), "board", "warning", "gc-sidecar restore --force"
    ),
    "the board is damaged": Fault(damage_the_board, "board", "error", "board.json"),
    "another sidecar writes the board": Fault(
        write_the_board_now, "other_sidecar", "warning", "one sidecar for each run directory"
    ),
    "anybody can read the secret": Fault(open_the_token, "endpoint_token", "warning", "chmod 640"),
    "the secret is empty": Fault(
        empty_the_token, "endpoint_token", "error", "restart the sidecar", ("transport",)
    ),
    "the engine cannot read the secret": Fault(
        close_the_token, "endpoint_token", "error", "fsGroup"
    ),
    "the engine does not answer": Fault(
        call_an_engine_that_is_not_there, "engine", "error", "the port that the engine serves on"
    ),
    "the engine is starting and does not answer": Fault(
        start_and_do_not_answer, "engine", "warning", "may still be starting", ("coverage",)
    ),
    "the engine is too old": Fault(
        restart_as(version="0.24.1"), "engine_version", "error", "0.25 or later"
    ),
    "no RPC is open": Fault(set_engine(rpc="none"), "transport", "warning", "--endpoint-plugin"),
    "a worker has no agent": Fault(
        set_engine(rpc="dev", names=["execute_method"]), "transport", "error", "--endpoint-plugin"
    ),
    "the sidecar's port is taken": Fault(take_the_port, "listener", "error", "GC_SIDECAR_PORT"),
    "the sidecar's port is silent": Fault(
        take_the_port_silently, "listener", "error", "GC_SIDECAR_PORT"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_the_remedy_says_what_to_do(name: str, pod: Pod) -> None:
    fault = FAULTS[name]
    ensure_endpoint_token(str(pod.run_dir))
    pod.start()
    fault.plant(pod)
    diagnosis = pod.doctor()
    assert fault.remedy in diagnosis.find(fault.check, fault.level)["remedy"]
    assert {finding["check"] for finding in diagnosis.bad} == {fault.check, *fault.others}
    assert diagnosis.code == {"error": 1, "warning": 4}[diagnosis.document["worst"]]
    for finding in diagnosis.document["findings"]:
        assert "\n" not in finding["reason"] + (finding["remedy"] or "")


def test_an_agent_of_another_release_is_a_warning(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.start(one_process=True)
    monkeypatch.setattr(doctor, "agent_version", "99.0")
    assert "install-agent" in pod.doctor().find("agent_version", "warning")["remedy"]


def run_a_free_threaded_agent(run_dir: str) -> None:
    sysconfig.get_config_vars()["Py_GIL_DISABLED"] = 1
    os.environ["GC_SIDECAR_RUN_DIR"] = run_dir
    this_process().start("worker", 0, 0, Topology((0,), 1, None), "stand-in")
    say("started")
    hear()


def test_a_collector_that_takes_no_policy_is_an_error(pod: Pod) -> None:
    with Child(run_a_free_threaded_agent, run_dir=str(pod.run_dir)) as child:
        assert child.hear() == "started"
        finding = pod.doctor().find("collector", "error")
    assert "worker dp0 rank 0" in finding["reason"]
    assert "3.10 to 3.13" in finding["remedy"]


def test_no_engine_at_all_is_a_warning_and_one_that_is_named_is_waited_for(pod: Pod) -> None:
    assert "start the engine" in pod.doctor().find("pages", "warning")["remedy"]
    call_an_engine_that_is_not_there(pod)
    diagnosis = pod.doctor()
    assert {finding["check"] for finding in diagnosis.bad} == {"engine"}
    assert "may still be starting" in diagnosis.find("engine", "error")["remedy"]


def test_dev_mode_on_every_address_is_a_warning(pod: Pod, tmp_path: Path) -> None:
    arguments = ["--workers=1", "--dev-mode", "--host=0.0.0.0"]
    with EmbeddedEngine(*arguments, run_dir=pod.run_dir, log_path=tmp_path / "log") as engine:
        pod.flags["--engine-url"] = engine.url
        diagnosis = pod.doctor()
    assert "--host 127.0.0.1" in diagnosis.find("dev_mode", "warning")["remedy"]


# --- the command ---


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, "--run-dir"),
        ({"--engine-url": "localhost"}, "--engine-url"),
        ({"--run-dir": "/r", "--url": "ftp://x"}, "ftp://x"),
        ({"--run-dir": "/r", "--token-file": "/nowhere/token"}, "/nowhere/token"),
    ],
)
def test_wrong_usage_is_exit_code_2(pod: Pod, flags: dict[str, str], said: str) -> None:
    pod.flags = flags
    diagnosis = pod.doctor()
    assert diagnosis.code == 2
    assert diagnosis.document == {}
    assert said in diagnosis.error


def test_its_flags_are_read_from_the_environment_as_those_of_serve(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = pod.start()
    pod.flags = {}
    monkeypatch.setenv("GC_SIDECAR_RUN_DIR", str(pod.run_dir))
    monkeypatch.setenv("GC_SIDECAR_ENGINE_URL", engine.url)
    monkeypatch.setenv("GC_SIDECAR_PORT", str(port := free_port()))
    diagnosis = pod.doctor()
    diagnosis.assert_sound()
    assert str(port) in diagnosis.find("listener", "ok")["reason"]


def test_the_engine_side_knows_the_tree_from_the_path_where_it_is_no_tree_itself(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmp_path / "agent"
    assert main(["install-agent", str(agent)]) == 0
    pod.capsys.readouterr()
    pod.flags = {}
    monkeypatch.chdir(tmp_path)
    source = str(Path(doctor.__file__).parents[2])
    for path, level in ((f"{source}:{agent}", "ok"), (source, "error")):
        monkeypatch.setenv("PYTHONPATH", path)
        finding = pod.doctor("--engine-side", "--preflight").find("agent_tree", level)
        assert (str(agent) in finding["reason"]) is (level == "ok")
