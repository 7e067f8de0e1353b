"""`gc-sidecar run` as a benchmark's container runs it: from the injected tree, with nothing of ours installed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gc_sidecar.install import install_agent
from gc_sidecar_agent.window import gc_window
from tests.embedded.engine import EmbeddedEngine, gone, scene
from tests.leaving_out import leave_out
from tests.sidecar_process import SidecarProcess, wait_for
from tests.vllm.scene import HELD_OFF, Scene, pids_of

FLAGS = ("--workers=2", "--heap-objects=1000")
EVERYONE = {"api_server-0-0", "engine_core-0-0", "worker-0-0", "worker-0-1"}
SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "report.v1.schema.json").read_text(encoding="utf-8")
)

pytestmark = pytest.mark.xdist_group("run")


@dataclass(frozen=True)
class Stage:
    """An engine, its sidecar, and the injected tree whose `run` is tried."""

    scene: Scene
    sidecar: SidecarProcess
    tree: Path

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """A container in which nothing of ours is installed, but for the tree."""
        return {
            "PATH": os.environ["PATH"],
            "GC_SIDECAR_PYTHON": sys.executable,
            "GC_SIDECAR_URL": self.sidecar.url,
            **(extra or {}),
        }

    def command(self, *words: str) -> list[str]:
        """`gc-sidecar run` with these words."""
        return [str(self.tree / "bin" / "gc-sidecar"), "run", *words]

    def run(self, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end; variables by keyword."""
        return subprocess.run(
            self.command(*words),
            env=self.environment(extra),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @contextlib.contextmanager
    def running(self, *words: str, **extra: str) -> Iterator[subprocess.Popen[str]]:
        """Run it beside the test, with a command that tells when it has begun."""
        with subprocess.Popen(
            self.command(*words),
            env=self.environment(extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            groups: set[int] = set()
            try:
                yield process
            finally:
                # The command has a group of its own, and may have outlived us.
                with contextlib.suppress(OSError):
                    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
                    groups = {int(pid) for pid in path.read_text().split()}
                process.kill()
                for group in groups:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(group, signal.SIGKILL)

    @property
    def mode(self) -> str:
        """The policy that is in force."""
        return str(self.sidecar.status()["policy"]["mode"])

    def assert_normal(self, before: Mapping[str, Any]) -> None:
        """Every process is as it was found, and no window is left open."""
        wait_for("normal GC", lambda: self.mode == "off")
        wait_for("as found", lambda: self.gc_state() == before)
        wait_for("every window is closed", lambda: self.open_windows() == [])

    def open_windows(self) -> list[str]:
        """The ids of those that are open."""
        windows = self.sidecar.get("/gc/windows")[1]["windows"]
        return [each["id"] for each in windows if each["state"] != "closed"]

    def gc_state(self) -> dict[str, Any]:
        """What the GC of every process really is like."""
        return self.scene.gc_state(pids_of(self.sidecar.status()))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_agent(tmp_path_factory.mktemp("tree")).directory


@pytest.fixture(scope="module")
def stage(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with (
        scene(tmp_path_factory.mktemp("run"), *FLAGS) as running,
        running.sidecar("run") as sidecar,
    ):
        sidecar.wait_for_coverage(len(EVERYONE))
        yield Stage(running, sidecar, tree)


def report_in(path: Path) -> dict[str, Any]:
    """A report that keeps to its schema."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(report, SCHEMA)
    return report


def codes(report: Mapping[str, Any]) -> list[str]:
    return [reason["code"] for reason in report["verdict"]["reasons"]]


# --- what it returns ---


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "exit 255"], 255),
        (["sh", "-c", "kill -TERM $$"], 143),
        (["sh", "-c", "kill -KILL $$"], 137),
        (["/etc/passwd"], 126),
        (["/nonexistent/bench"], 127),
        (["no-such-bench"], 127),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_its_exit_code_is_the_commands_as_a_shell_gives_it_and_gc_is_as_found(
    stage: Stage, tmp_path: Path, command: list[str], code: int
) -> None:
    before = stage.gc_state()
    done = stage.run("--report", str(tmp_path / "r.json"), "--", *command)
    assert done.returncode == code, done.stderr
    report = report_in(tmp_path / "r.json")
    assert report["exit_code"] == code
    assert stage.mode == "off"
    stage.assert_normal(before)


def test_the_output_is_the_commands_byte_for_byte_and_ours_is_on_standard_error(
    stage: Stage,
) -> None:
    code = r"import os; os.write(1, bytes(range(256)) * 99); os.write(2, b'theirs\n')"
    done = subprocess.run(
        stage.command("--", sys.executable, "-c", code),
        env=stage.environment(),
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == bytes(range(256)) * 99
    told = done.stderr.decode().splitlines()
    assert [line for line in told if not line.startswith("gc-sidecar: run: ")] == ["theirs"]
    assert told[-1] == "gc-sidecar: run: clean under freeze, exit code 0"


def test_the_command_has_the_signals_and_the_input_that_any_other_has(stage: Stage) -> None:
    code = (
        "import signal, sys; print(sys.stdin.read(), signal.pthread_sigmask(signal.SIG_BLOCK, ()),"
        " hex(int(open('/proc/self/status').read().split('SigIgn:')[1].split()[0], 16) & 0x7fffffff))"
    )
    done = subprocess.run(
        stage.command("--policy=off", "--", sys.executable, "-c", code),
        env=stage.environment(), input="what was piped", capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    # CPython itself ignores SIGPIPE and SIGXFSZ; glibc's own two real-time signals are left out.
    assert done.stdout == "what was piped set() 0x1001000\n"


# --- the policy, and what is known of it ---


@pytest.mark.parametrize("policy", ["freeze", "budget"])
def test_the_policy_is_in_force_while_it_runs_and_the_report_shows_before_during_and_after(
    stage: Stage, tmp_path: Path, policy: str
) -> None:
    verdict = tmp_path / "verdict"
    flags = [f"--policy={policy}", f"--report={tmp_path / 'r.json'}", f"--verdict-file={verdict}"]
    ask = f"{stage.tree / 'bin' / 'gc-sidecar'} status --json"
    done = stage.run(*flags, "--owner=bench 7", "--", "sh", "-c", ask)
    assert done.returncode == 0, done.stderr
    during = json.loads(done.stdout)
    assert (during["policy"]["mode"], during["policy"]["owner"]) == (policy, "bench 7")
    report = report_in(tmp_path / "r.json")
    assert report["verdict"]["state"] == "clean"
    assert report["policy"]["pause_budget_ms"] == (5.0 if policy == "budget" else None)
    (sidecar,) = report["sidecars"]
    assert sidecar["coverage"] == {"acknowledged": len(EVERYONE), "expected": len(EVERYONE)}
    assert sidecar["versions"]["engines"] == ["embedded 0.1.0"]
    for process in sidecar["processes"]:
        assert process["gc"]["before"] == process["gc"]["after"]
        assert process["gc"]["before"]["threshold"] == [700, 10, 10]
        assert (process["gc"]["during"]["threshold"][2] == HELD_OFF) == (policy == "freeze")
    assert verdict.read_text() == f"clean under {policy}, exit code 0\n"


def test_with_policy_off_it_only_observes(stage: Stage, tmp_path: Path) -> None:
    generation = stage.sidecar.status()["policy"]["generation"]
    code = (
        "import urllib.request as r, sys; r.urlopen(r.Request(sys.argv[1], method='POST')).read()"
    )
    maintain = f"{stage.sidecar.url}/gc/maintain"
    done = stage.run(
        "--policy=off",
        f"--report={tmp_path / 'r.json'}",
        "--",
        sys.executable,
        "-c",
        code,
        maintain,
    )
    assert done.returncode == 0, done.stderr
    report = report_in(tmp_path / "r.json")
    # Somebody collected in it, and that is told; nothing else is done about it.
    assert report["verdict"]["state"] == "not_clean"
    assert "maintained" in codes(report)
    assert "NOT clean under off, exit code 0: maintained" in done.stderr
    assert stage.sidecar.status()["policy"]["generation"] == generation


def test_what_is_not_clean_is_an_error_where_that_is_required(stage: Stage) -> None:
    collect = ("--", str(stage.tree / "bin" / "gc-sidecar"), "maintain", "--force")
    assert stage.run("--require-clean", *collect).returncode == 123
    assert stage.run("--require-clean", "--", "true").returncode == 0
    # What the command has to say of itself comes first.
    failing = f"{collect[1]} maintain --force >&2; exit 9"
    assert stage.run("--require-clean", "--", "sh", "-c", failing).returncode == 9


def test_what_looks_like_a_secret_is_not_in_the_report(stage: Stage, tmp_path: Path) -> None:
    words = [
        *(
            "--api-key",
            "s3cret",
            "--max-tokens",
            "128",
            "--hf-token=s3cret",
            "OPENAI_API_KEY=s3cret",
        ),
        *("--header", "Authorization=Bearer s3cret", "-H", "Authorization: Bearer s3cret"),
        *('{"api_key": "s3cret", "n": 1}', "http://u:s3cret@h/", "--passwd", "s3cret"),
        *('AWS_SECRET_ACCESS_KEY="s3cret"', "--extra", "{'token':'s3cret'}"),
    ]
    done = stage.run(
        "--policy=off", f"--report={tmp_path / 'r.json'}", "--", "true", *words,
        GC_SIDECAR_ENGINE_ARGS="serve m --api-key s3cret --seed 1", GC_SIDECAR_NODE="b200-7",
    )  # fmt: skip
    assert done.returncode == 0
    text = (tmp_path / "r.json").read_text()
    assert "s3cret" not in text
    report = report_in(tmp_path / "r.json")
    assert report["command"]["argv"][3:5] == ["--max-tokens", "128"]
    assert report["environment"]["engine_args"] == "serve m --api-key *** --seed 1"
    assert report["environment"]["node"] == "b200-7"


def test_the_commands_own_gc_is_metered_where_that_is_asked_for(
    stage: Stage, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    log = tmp_path / "their-own"
    (site / "sitecustomize.py").write_text(f"print('x', file=open({str(log)!r}, 'a'))\n")
    code = "import gc; kept = [[i] for i in range(400_000)]; gc.collect()"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    done = stage.run(
        "--policy=off", "--observe-client", f"--report={tmp_path / 'r.json'}", "--",
        sys.executable, "-c", nested, PYTHONPATH=str(site),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert log.read_text() == "x\n" * 3, "theirs has run too, in ours as well"
    client = report_in(tmp_path / "r.json")["client"]
    assert client["processes"] == 2
    # The explicit one; on a busy machine a young one may have taken longer.
    assert 2 in {pause["gc_generation"] for pause in client["longest"]}
    assert client["max_s"] > 0.001
    assert "the command's own GC: " in done.stderr


# --- every way out ---


def begun(process: subprocess.Popen[str]) -> None:
    """Wait until the command runs."""
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_goes_to_the_command_and_what_it_makes_of_it_is_the_exit_code(
    stage: Stage, number: signal.Signals
) -> None:
    before = stage.gc_state()
    script = f"trap 'exit 17' {number.name[3:]}; echo begun; while :; do sleep 0.05; done"
    with stage.running("--", "sh", "-c", script) as process:
        begun(process)
        assert stage.mode == "freeze"
        process.send_signal(number)
        assert process.wait(20) == 17
    stage.assert_normal(before)


@pytest.mark.parametrize("after_s", [0.2, 0.35, 0.5, 0.7])
def test_a_signal_at_any_moment_leaves_neither_policy_nor_window(
    stage: Stage, after_s: float
) -> None:
    before = stage.gc_state()
    with stage.running("--", "sleep", "60") as process:
        time.sleep(after_s)  # wherever that is: waiting, entering, opening, running
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        # Before it has begun to wait for signals they end it as they end any process.
        assert process.wait(30) in (143, 130, -signal.SIGTERM, -signal.SIGINT)
    stage.assert_normal(before)


def test_what_the_command_has_started_is_ended_with_it(stage: Stage, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {pid_file}; wait"
    done = stage.run("--policy=off", "--timeout=500ms", "--", "sh", "-c", script)
    assert done.returncode == 124
    assert gone([int(pid_file.read_text())])


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("{run} -- true >&-", 0),
        ("{run} -- sh -c 'exit 4' <&- >&- 2>&-", 4),
        ("{run} --report - -- sh -c 'exit 6' >/dev/full", 6),
        ("{run} --report - -- sh -c 'exit 6' >&-", 6),
        ("{run} -- sh -c 'exit 5' 2>/dev/full", 5),
        ("set -o pipefail; {run} -- sh -c 'exit 5' 2>&1 >/dev/null | true", 5),
        ("set -o pipefail; {run} --report - -- sh -c 'exit 6' | true", 6),
    ],
)
def test_where_nobody_hears_us_the_exit_code_is_the_commands_all_the_same(
    stage: Stage, line: str, code: int
) -> None:
    before = stage.gc_state()
    done = subprocess.run(
        ["bash", "-c", line.format(run=" ".join(stage.command()))],
        env=stage.environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    stage.assert_normal(before)


def test_with_standard_error_closed_nothing_of_ours_is_in_the_output(stage: Stage) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{' '.join(stage.command())} --policy=off -- echo theirs 2>&-"],
        env=stage.environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "theirs\n")


def test_a_parent_that_ignores_its_children_does_not_make_it_wait_for_ever(stage: Stage) -> None:
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN);"
        " os.execv(sys.argv[1], sys.argv[1:])"
    )
    program = [
        sys.executable,
        "-m",
        "gc_sidecar",
        "run",
        "--policy=off",
        "--",
        "sh",
        "-c",
        "exit 3",
    ]
    done = subprocess.run(
        [sys.executable, "-c", ignoring, *program],
        env={**stage.environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr


def test_a_script_without_an_interpreter_line_is_run_by_the_shell(
    stage: Stage, tmp_path: Path
) -> None:
    script = tmp_path / "bench"
    script.write_text('exit "$1"\n')
    script.chmod(0o755)
    assert stage.run("--policy=off", "--", str(script), "8").returncode == 8


def test_a_command_over_its_time_is_ended_also_one_that_does_not_want_to(stage: Stage) -> None:
    before = stage.gc_state()
    stubborn = "trap '' TERM; echo begun; while :; do sleep 0.05; done"
    done = stage.run("--timeout=500ms", "--kill-after=300ms", "--", "sh", "-c", stubborn)
    assert done.returncode == 124
    assert "--timeout of 0.5 s is over" in done.stderr
    stage.assert_normal(before)


def test_a_signal_while_it_waits_ends_it_at_once(stage: Stage) -> None:
    with stage.running("--url=http://127.0.0.1:9", "--", "true") as process:
        assert process.stderr is not None
        assert "waiting for the engine" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143
    assert stage.mode == "off"


def test_where_it_is_killed_the_lease_ends_the_policy(stage: Stage) -> None:
    before = stage.gc_state()
    with stage.running("--lease=10s", "--", "sh", "-c", "echo begun; exec sleep 30") as process:
        begun(process)
        assert stage.mode == "freeze"
        process.kill()
    stage.assert_normal(before)


def test_a_lease_is_renewed_for_as_long_as_the_command_runs(stage: Stage) -> None:
    with stage.running("--lease=10s", "--", "sh", "-c", "echo begun; exec sleep 60") as process:
        begun(process)

        def expires_at() -> str:
            return str(stage.sidecar.status()["policy"]["lease_expires_at"])

        first = expires_at()
        wait_for("it is renewed", lambda: expires_at() > first)
        process.terminate()
        assert process.wait(20) == 143
    wait_for("normal GC", lambda: stage.mode == "off")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--policy=melt"], "none of off, freeze, budget"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--timeout=0"], "must be more than 0"),
        (["--pause-budget=5ms"], "belongs to --policy budget"),
        (["--max-pause=50"], "has no unit"),
        (["--lease=1s"], "at least 10s"),
        (["--report=/nonexistent/r.json"], "there is no directory"),
        (["--token-file=/nonexistent"], "No such file"),
        (["--url=ftp://here"], "is not an http"),
        (["--engine-timeout=1s", "--url=http://127.0.0.1:9"], "no engine was ready within 1 s"),
        (
            ["--engine-timeout=1s", "--url=dns+http://no.such.name.invalid:9470"],
            "no engine was ready",
        ),
    ],
)
def test_what_cannot_be_is_ours_and_changes_nothing(
    stage: Stage, flags: list[str], told: str
) -> None:
    generation = stage.sidecar.status()["policy"]["generation"]
    done = stage.run(*flags, "--", "touch", "/nonexistent/was-run")
    assert (done.returncode, told in done.stderr) == (125, True), done.stderr
    assert stage.sidecar.status()["policy"]["generation"] == generation


def test_without_a_command_it_says_how_to_give_one(stage: Stage) -> None:
    for words in ((), ("--",), ("--policy=off", "--")):
        done = stage.run(*words)
        assert (done.returncode, "-- COMMAND" in done.stderr) == (125, True)


def test_a_policy_of_somebody_else_is_left_alone(stage: Stage) -> None:
    assert stage.sidecar.post("/gc/freeze", {"owner": "another"})[0] == 200
    try:
        done = stage.run("--", "echo", "was run")
        assert (done.returncode, done.stdout) == (125, ""), done.stderr
        assert "did not enter freeze" in done.stderr
        policy = stage.sidecar.status()["policy"]
        assert (policy["mode"], policy["owner"]) == ("freeze", "another")
    finally:
        assert stage.sidecar.post("/gc/restore", {"owner": "another"})[0] == 200


def test_where_the_clients_pauses_cannot_be_kept_nothing_is_run(stage: Stage) -> None:
    generation = stage.sidecar.status()["policy"]["generation"]
    code = (
        "import sys, tempfile; tempfile.tempdir = '/nonexistent';"
        "from gc_sidecar_agent.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["run", "--observe-client", "--", "echo", "was run"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**stage.environment(), "PYTHONPATH": str(stage.tree)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (125, ""), done.stderr
    assert "FileNotFoundError" in done.stderr
    assert stage.sidecar.status()["policy"]["generation"] == generation


def test_an_engine_that_is_lost_ends_the_command(tree: Path, tmp_path: Path) -> None:
    with scene(tmp_path, *FLAGS) as running, running.sidecar("lost") as sidecar:
        sidecar.wait_for_coverage(len(EVERYONE))
        stage = Stage(running, sidecar, tree)
        words = [f"--report={tmp_path / 'r.json'}", "--", "sh", "-c", "echo begun; exec sleep 60"]
        with stage.running(*words) as process:
            begun(process)
            assert isinstance(running.engine, EmbeddedEngine)
            os.kill(running.engine.pids("worker dp0 r1")[0], signal.SIGKILL)
            assert process.wait(20) == 125
        report = report_in(tmp_path / "r.json")
        assert "the engine is lost" in report["command"]["stopped_because"]
        assert report["command"]["signal"] == signal.SIGTERM
        assert "process_gone" in codes(report)


def test_a_sidecar_that_restarts_meanwhile_leaves_the_verdict_unknown(
    tree: Path, tmp_path: Path
) -> None:
    with scene(tmp_path, *FLAGS) as running, running.sidecar("first") as first:
        first.wait_for_coverage(len(EVERYONE))
        stage = Stage(running, first, tree)
        before = stage.gc_state()
        words = ["--require-clean", f"--report={tmp_path / 'r.json'}", "--", "sh", "-c"]
        go_on = tmp_path / "go-on"
        script = f"echo begun; while ! [ -e {go_on} ]; do sleep 0.05; done"
        with stage.running(*words, script) as process:
            begun(process)
            os.kill(first.pid, signal.SIGKILL)
            assert gone([first.pid])
            first.__enter__()  # again, at the same address
            first.wait_for_coverage(len(EVERYONE))
            go_on.touch()
            assert process.wait(20) == 123
            stage.assert_normal(before)
        report = report_in(tmp_path / "r.json")
        assert (report["verdict"]["state"], codes(report)) == ("unknown", ["window_lost"])


# --- as process 1, and on another Python ---


def test_as_process_1_it_passes_signals_on_and_reaps_orphans(stage: Stage) -> None:
    unshare = shutil.which("unshare")
    is_possible = (
        unshare is not None
        and not subprocess.run(
            [unshare, "--pid", "--fork", "--mount-proc", "true"], check=False, capture_output=True
        ).returncode
    )
    if not is_possible:
        leave_out("needs unshare and root, for a PID namespace")
    # An orphan whose parent has ended before it; then what is a zombie is counted.
    script = (
        "(sleep 0.1 & exec true); sleep 1; grep -l '^State:.Z' /proc/[0-9]*/status | wc -l;"
        " trap 'echo told; exit 5' TERM; echo begun; while :; do sleep 0.05; done"
    )
    command = stage.command("--policy=off", "--", "sh", "-c", script)
    with subprocess.Popen(
        [str(unshare), "--pid", "--fork", "--mount-proc", "--kill-child", *command],
        env=stage.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        begun(process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        assert process.wait(20) == 5
        assert process.stdout.read() == "told\n"


def test_a_client_image_may_have_an_older_python(stage: Stage, tmp_path: Path) -> None:
    python = next(Path.home().glob(".pyenv/versions/3.9.*/bin/python3"), None)
    if python is None:
        leave_out("needs a CPython 3.9")
    done = stage.run(
        "--observe-client", f"--report={tmp_path / 'r.json'}", "--", str(python), "-c", "print('ran')",
        GC_SIDECAR_PYTHON=str(python),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert report_in(tmp_path / "r.json")["environment"]["python"].startswith("3.9.")


# --- several at once ---


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scene, SidecarProcess]]:
    with (
        scene(tmp_path_factory.mktemp("other"), *FLAGS) as running,
        running.sidecar("other") as sidecar,
    ):
        sidecar.wait_for_coverage(len(EVERYONE))
        yield running, sidecar


def test_two_engines_have_the_policy_together_and_one_report(
    stage: Stage, other: tuple[Scene, SidecarProcess], tmp_path: Path
) -> None:
    _, second = other
    urls = [f"--url={stage.sidecar.url}", f"--url={second.url}"]
    ask = f"{stage.tree / 'bin' / 'gc-sidecar'} status --json --url"
    one_line = "| tr -d '\\n'; echo"
    script = f"{ask} {stage.sidecar.url} {one_line}; {ask} {second.url} {one_line}"
    done = stage.run(*urls, f"--report={tmp_path / 'r.json'}", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    modes = [json.loads(line)["policy"]["mode"] for line in done.stdout.splitlines()]
    assert modes == ["freeze", "freeze"]
    report = report_in(tmp_path / "r.json")
    assert [each["url"] for each in report["sidecars"]] == [stage.sidecar.url, second.url]
    assert stage.mode == second.status()["policy"]["mode"] == "off"


def test_where_one_of_two_does_not_take_part_neither_has_the_policy(
    stage: Stage, other: tuple[Scene, SidecarProcess]
) -> None:
    _, second = other
    urls = [f"--url={stage.sidecar.url}", f"--url={second.url}"]
    assert second.post("/gc/freeze", {"owner": "another"})[0] == 200
    try:
        done = stage.run(*urls, "--", "echo", "was run")
        assert (done.returncode, done.stdout) == (125, ""), done.stderr
        assert second.url in done.stderr
        assert stage.mode == "off"
        assert second.status()["policy"]["owner"] == "another"
    finally:
        assert second.post("/gc/restore", {"owner": "another"})[0] == 200


def test_a_name_stands_for_every_address_that_it_has(stage: Stage, tmp_path: Path) -> None:
    port = stage.sidecar.url.rpartition(":")[2]
    done = stage.run(
        f"--url=dns+http://localhost:{port}",
        "--sidecars=1",
        f"--report={tmp_path / 'r.json'}",
        "--",
        "true",
    )
    assert done.returncode == 0, done.stderr
    (sidecar,) = report_in(tmp_path / "r.json")["sidecars"]
    assert sidecar["url"] == f"http://127.0.0.1:{port}"


# --- windows for other harnesses ---


def test_a_window_is_opened_and_closed_by_command(stage: Stage) -> None:
    def window(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(stage.tree / "bin" / "gc-sidecar"), "window", *words],
            env=stage.environment(), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    opened = window("open", "--name=sweep 7", "--max-pause=20ms")
    window_id = opened.stdout.strip()
    assert opened.returncode == 0, opened.stderr
    assert "clean so far" in window("show", window_id).stdout
    assert stage.sidecar.post("/gc/maintain", {"force": True})[0] == 200
    closed = window("close", "--require-clean", window_id)
    assert closed.returncode == 1
    assert "NOT clean" in closed.stdout
    assert window("close", window_id).returncode == 0, "and it stays as it is"
    assert window("close").returncode == window().returncode == 2
    assert window("close", "no-such-window").returncode == 1


def test_a_python_harness_has_a_window_around_its_block(stage: Stage) -> None:
    with gc_window(stage.sidecar.url, "block", max_pause_ms=1000) as window:
        assert not window.is_clean
        time.sleep(0.01)
    assert window.is_clean, window.verdict
    assert window.verdict["reasons"] == []
    with (
        pytest.raises(ZeroDivisionError),
        gc_window(stage.sidecar.url) as broken,
    ):
        _ = 1 / 0
    assert broken.document["state"] == "closed"
