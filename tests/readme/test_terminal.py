"""The engine on a terminal: `top` in a real tmux, `pauses --follow` in a pipe, `export` as a trace."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.embedded.engine import scene
from tests.leaving_out import leave_out
from tests.sidecar_process import SidecarProcess, wait_for
from tests.unit.agent.test_commands import STATUS, process
from tests.unit.answering import AnsweringSidecar, pause

FLAGS = ("--workers=2", "--heap-objects=20000")
PROCESSES = 4
SIZES = [(80, 24), (200, 50)]
COMMAND = [sys.executable, "-m", "gc_sidecar"]
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
# Colours, but not bold or dim.
COLOUR = re.compile(r"\x1b\[[0-9;]*\b(3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")

pytestmark = pytest.mark.xdist_group("terminal")


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with (
        scene(tmp_path_factory.mktemp("terminal"), *FLAGS, probe=False) as running,
        running.sidecar("terminal") as sidecar,
    ):
        sidecar.wait_for_coverage(PROCESSES)
        yield sidecar


def environment(url: str, **extra: str) -> dict[str, str]:
    kept = ("PATH", "PYTHONPATH", "HOME")
    variables = {name: os.environ[name] for name in kept if name in os.environ}
    return {**variables, "GC_SIDECAR_URL": url, "LC_ALL": "C.UTF-8", **extra}


@contextlib.contextmanager
def without(sidecar: SidecarProcess) -> Iterator[None]:
    """A sidecar that is down meanwhile, and is started again at the same address."""
    sidecar.__exit__(None, None, None)
    try:
        yield
    finally:
        sidecar.__enter__()
        sidecar.wait_for_coverage(PROCESSES)


def collect(sidecar: SidecarProcess) -> None:
    """A full collection in every process."""
    code, body = sidecar.post("/gc/maintain", {"force": True})
    assert code == 200, body


# --- top ---


@dataclass
class Terminal:
    """A command in a tmux of its own, and what is on its screen."""

    directory: Path
    width: int
    height: int

    @contextlib.contextmanager
    def running(self, script: str, variables: dict[str, str]) -> Iterator[Terminal]:
        """With a shell script on it."""
        try:
            self._tmux(
                *("start-server", ";", "set", "-g", "status", "off", ";"),
                *("new-session", "-d", "-x", str(self.width), "-y", str(self.height)),
                *("sh", "-c", script),
                variables=variables,
            )
            yield self
        finally:
            self._tmux("kill-server", check=False)

    def lines(self, *flags: str) -> list[str]:
        """The screen as it is now."""
        return self._tmux("capture-pane", "-p", *flags).splitlines()

    def shows(self, pattern: str) -> bool:
        """Whether a line of it has this."""
        return any(re.search(pattern, line) for line in self.lines())

    def wait_for(self, pattern: str) -> None:
        """Wait until it shows this."""
        try:
            wait_for(pattern, lambda: self.shows(pattern))
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *self.lines()])) from None

    def press(self, *keys: str) -> None:
        """Type."""
        self._tmux("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        """As somebody who drags the window's corner."""
        self._tmux("resize-window", "-x", str(width), "-y", str(height))
        self.width, self.height = width, height

    def _tmux(
        self, *words: str, variables: dict[str, str] | None = None, check: bool = True
    ) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self.directory / "tmux"), "-f", "/dev/null", *words],
            env=variables or environment(""),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    if shutil.which("tmux") is None:
        leave_out("tmux is not installed")
    return Terminal(tmp_path, 80, 24)


def top(*flags: str) -> str:
    """A script that runs it, tells how it ended, and whether the terminal is as before."""
    command = " ".join([*COMMAND, "top", *flags])
    return (
        f"before=$(stty -g); {command}; echo ended with $?;"
        ' [ "$(stty -g)" = "$before" ] && echo all is as before; cat'
    )


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_top_shows_policy_processes_memory_and_pauses_within_the_screen(
    width: int, height: int, sidecar: SidecarProcess, terminal: Terminal
) -> None:
    terminal.width, terminal.height = width, height
    collect(sidecar)
    with terminal.running(top(), environment(sidecar.url)):
        terminal.wait_for(rf"coverage  {PROCESSES} of {PROCESSES} processes, transport plugin")
        terminal.wait_for(r"gen2  maintain")
        assert terminal.shows(r"^policy    off$")
        assert sidecar.post("/gc/freeze", {"owner": "bench-7"})[0] == 200
        try:
            terminal.wait_for(
                r"^policy    freeze, since \d\d:\d\d:\d\d, until \d\d:\d\d:\d\d \((59|60) min left\), by bench-7$"
            )
        finally:
            assert sidecar.post("/gc/restore", {"force": True})[0] == 200
        terminal.wait_for(r"^policy    off")
        lines = terminal.lines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for role, count in (("api_server", 1), ("engine_core", 1), ("worker", 2)):
        rows = re.findall(rf"^{role} .* normal GC .* [mu]?s .* [KMG]iB", text, re.MULTILINE)
        assert len(rows) == count, text
    assert re.search(r"^pauses .*[▁▂▃▄▅▆▇█].* longest [\d.]+ m?s in the last 5 min$", text, re.M)
    assert re.search(r"^memory .*[▁▂▃▄▅▆▇█].* [\d.]+ [MG]iB, .* meanwhile$", text, re.M)
    assert re.search(
        r"^\d\d:\d\d:\d\d\.\d{3}  worker 0 [01] +gen2  (maintain|entry|restore)", text, re.M
    )
    assert ("PID" in text) == ("PAUSES 5 min" in text) == (width == 200), "it uses the room it has"


def test_top_follows_the_size_of_its_window(sidecar: SidecarProcess, terminal: Terminal) -> None:
    with terminal.running(top(), environment(sidecar.url)):
        terminal.wait_for("^ROLE")
        assert not terminal.shows("PAUSES 5 min")
        terminal.resize(200, 50)
        terminal.wait_for("PAUSES 5 min")
        terminal.resize(80, 24)
        wait_for("it is narrow again", lambda: not terminal.shows("PAUSES 5 min"))
        terminal.wait_for("^worker ")


def test_a_connection_that_breaks_is_shown_and_heals(
    sidecar: SidecarProcess, terminal: Terminal
) -> None:
    with terminal.running(top(), environment(sidecar.url)):
        terminal.wait_for("^worker ")
        with without(sidecar):
            terminal.wait_for(r"^NO ANSWER for \d+ s, trying again: no sidecar answers")
            assert terminal.shows("^worker "), "what was seen last stays"
        wait_for("it is answered again", lambda: not terminal.shows("NO ANSWER"))
        collect(sidecar)
        newest = sidecar.get("/gc/pauses?gc_generation=2&limit=1")[1]["pauses"][0]
        terminal.wait_for(re.escape(f"{newest['collected_objects']:,} collected"))


def test_top_may_be_started_before_the_sidecar(sidecar: SidecarProcess, terminal: Terminal) -> None:
    with without(sidecar), contextlib.ExitStack() as stack:
        stack.enter_context(terminal.running(top(), environment(sidecar.url)))
        terminal.wait_for("NO ANSWER")
        assert terminal.shows("policy    not known yet")
        terminal_stays = stack.pop_all()
    with terminal_stays:
        terminal.wait_for("^worker ")


@pytest.mark.parametrize(("key", "code"), [("q", 0), ("C-c", 130), ("C-\\", 131)])
def test_a_key_ends_it_and_leaves_the_terminal_as_it_was(
    key: str, code: int, sidecar: SidecarProcess, terminal: Terminal
) -> None:
    # A script of its own: of Ctrl-C the shell would die with it.
    with terminal.running(f"trap : INT QUIT; {top()}", environment(sidecar.url)):
        terminal.wait_for("^worker ")
        terminal.press(key)
        terminal.wait_for(f"^ended with {code}$")
        terminal.wait_for("^all is as before$")
        assert not terminal.shows("Traceback|^worker ")


def test_it_gives_the_terminal_back_while_it_is_suspended(
    sidecar: SidecarProcess, terminal: Terminal
) -> None:
    # A shell with jobs: the command is stopped, the script goes on and brings it back.
    script = top().replace("; cat", "; read go; fg; echo gone on to $?; cat")
    with terminal.running(f"exec bash -mc '{script}'", environment(sidecar.url)):
        terminal.wait_for("^worker ")
        terminal.press("C-z")
        terminal.wait_for("^all is as before$")
        assert not terminal.shows("^worker ")
        terminal.press("Enter")
        terminal.wait_for("^worker ")
        terminal.press("q")
        terminal.wait_for("^gone on to 0$")


def test_a_key_ends_it_also_while_the_sidecar_does_not_answer(terminal: Terminal) -> None:
    with _silent() as url, terminal.running(top(), environment(url)):
        terminal.wait_for("not known yet")
        terminal.press("q")
        terminal.wait_for("^ended with 0$")


@contextlib.contextmanager
def _silent() -> Iterator[str]:
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was_too(
    number: int, sidecar: SidecarProcess, terminal: Terminal
) -> None:
    script = f"echo $$ > {terminal.directory}/pid; exec {' '.join(COMMAND)} top"
    with terminal.running(
        f"before=$(stty -g); sh -c '{script}'; echo ended with $?;"
        ' [ "$(stty -g)" = "$before" ] && echo all is as before; cat',
        environment(sidecar.url),
    ):
        terminal.wait_for("^worker ")
        os.kill(int((terminal.directory / "pid").read_text()), number)
        terminal.wait_for(f"^ended with {128 + number}$")
        terminal.wait_for("^all is as before$")


@pytest.mark.parametrize("no_color", [{}, {"NO_COLOR": "1"}], ids=["colour", "NO_COLOR"])
def test_there_is_no_colour_where_nobody_wants_it(
    no_color: dict[str, str], sidecar: SidecarProcess, terminal: Terminal
) -> None:
    with terminal.running(top(), environment(sidecar.url, **no_color)):
        terminal.wait_for("^worker .*normal GC")
        text = "\n".join(terminal.lines("-e"))
    assert bool(COLOUR.search(text)) == (not no_color)


def test_of_64_processes_those_where_something_happens_are_seen_and_all_can_be_scrolled_to(
    terminal: Terminal,
) -> None:
    rows = [process("worker", rank) for rank in range(64)]
    rows[47] |= {"state": "stale"}
    status = {**STATUS, "processes": rows, "coverage": {"acknowledged": 63, "expected": 64}}
    with AnsweringSidecar() as stand_in:
        stand_in.answers = {"/gc": status, "/gc/pauses": {"pauses": [pause()]}}
        with terminal.running(top(), environment(stand_in.url)):
            terminal.wait_for(r"^worker +0 +47 .* stale")
            terminal.wait_for(r"^\d+ more, all calm; ")
            assert not terminal.shows(r"^worker +0 +63 ")
            terminal.press(*["NPage"] * 8)
            terminal.wait_for(r"^worker +0 +63 ")
            terminal.press("Home")
            terminal.wait_for(r"^\d+ more, all calm; ")


def test_it_asks_at_most_once_a_second(terminal: Terminal) -> None:
    with AnsweringSidecar() as stand_in:
        stand_in.answers = {"/gc": STATUS, "/gc/pauses": {"pauses": [pause()]}}
        with terminal.running(top("--interval", "10ms"), environment(stand_in.url)):
            wait_for("the first answer", lambda: "/gc" in stand_in.paths)
            started = time.monotonic()
            wait_for("four more", lambda: stand_in.paths.count("/gc") >= 5)
            assert time.monotonic() - started > 3.9
    assert max(Counter(path.split("?")[0] for path in stand_in.paths).values()) <= 12


# --- pauses --follow ---


@dataclass
class Following:
    """`pauses --follow` in a pipe, and what it has said so far."""

    process: subprocess.Popen[str]
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)

    def pauses(self) -> list[dict[str, Any]]:
        """What it printed with --json."""
        return [json.loads(line) for line in self.out]


@contextlib.contextmanager
def following(url: str, *flags: str) -> Iterator[Following]:
    with subprocess.Popen(
        [*COMMAND, "pauses", "--follow", "--json", *flags],
        env=environment(url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        found = Following(process)
        threads = [
            threading.Thread(target=_read, args=(process.stdout, found.out)),
            threading.Thread(target=_read, args=(process.stderr, found.err)),
        ]
        for thread in threads:
            thread.start()
        try:
            yield found
        finally:
            process.kill()
            for thread in threads:
                thread.join()


def _read(file: Any, lines: list[str]) -> None:
    for line in file:
        lines.append(line)


def asked_for(pauses: Sequence[dict[str, Any]], since: datetime) -> list[dict[str, Any]]:
    """Those of a maintenance that began later."""
    return [
        each
        for each in pauses
        if each["trigger"] == "maintain" and datetime.fromisoformat(_iso(each)) > since
    ]


def _iso(each: dict[str, Any]) -> str:
    return str(each["started_at"]).replace("Z", "+00:00")


def test_following_tells_a_pause_within_two_seconds(sidecar: SidecarProcess) -> None:
    collect(sidecar)
    with following(sidecar.url, "--full") as found:
        wait_for("what is recorded is told", lambda: len(found.out) >= PROCESSES)
        since = datetime.now(timezone.utc)
        collect(sidecar)
        ended = time.monotonic()
        wait_for("the pauses", lambda: len(asked_for(found.pauses(), since)) == PROCESSES)
        assert time.monotonic() - ended < 2.0
        assert [each["gc_generation"] for each in found.pauses()] == [2] * len(found.out)
        found.process.send_signal(signal.SIGINT)
        assert found.process.wait(10) == 130
    assert found.err == []


def test_following_tells_each_pause_once_whatever_becomes_of_the_sidecar(
    sidecar: SidecarProcess,
) -> None:
    since = datetime.now(timezone.utc)
    with following(sidecar.url, "--full") as found:
        collect(sidecar)
        wait_for("the first", lambda: len(asked_for(found.pauses(), since)) == PROCESSES)
        with without(sidecar):
            wait_for("it is told", lambda: "trying again" in "".join(found.err))
        wait_for("it is told", lambda: "answered again" in "".join(found.err))
        collect(sidecar)
        wait_for("the second", lambda: len(asked_for(found.pauses(), since)) == 2 * PROCESSES)
    # Nothing of before is told anew, though the new sidecar has it too.
    told = Counter((each["pid"], each["duration_s"]) for each in found.pauses())
    assert set(told.values()) == {1}
    assert "some may be missing: the sidecar was restarted" in "".join(found.err)


# --- export ---


def trace_events(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The slices of a trace that keeps to the trace-event format, and to what Perfetto asks of one: slices of
    one thread nest, or come one after another."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(trace["traceEvents"], list)
    named: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    slices = []
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        # Perfetto's tids have 32 bits, and 0 is the idle task.
        assert all(isinstance(event[name], int) for name in ("pid", "tid"))
        assert 0 < event["pid"] < 1 << 31
        if event["ph"] == "M":
            value = event["args"]["sort_index" if "sort" in event["name"] else "name"]
            assert isinstance(value, int if "sort" in event["name"] else str)
            named[event["name"]].add((event["pid"], event["tid"]))
            continue
        assert event["ph"] == "X"
        assert 0 < event["tid"] < 1 << 31
        assert isinstance(event["cat"], str)
        assert isinstance(event["ts"], Decimal)
        assert event["dur"] >= 0
        slices.append(event)
    ends: dict[tuple[int, int], list[Decimal]] = defaultdict(list)
    for event in sorted(slices, key=lambda each: (each["ts"], -each["dur"])):
        thread = event["pid"], event["tid"]
        assert thread in named["thread_name"]
        assert (event["pid"], 0) in named["process_name"]
        around = ends[thread]
        while around and around[-1] <= event["ts"]:
            around.pop()
        assert not around or event["ts"] + event["dur"] <= around[-1], (
            f"{event} lies across another"
        )
        around.append(event["ts"] + event["dur"])
    return slices


def test_the_slices_of_an_exported_trace_are_the_pauses_operations_and_windows(
    sidecar: SidecarProcess, tmp_path: Path
) -> None:
    code, _ = sidecar.post("/gc/windows", {"window_id": "run-1", "max_pause_ms": 0.001})
    assert code == 201
    collect(sidecar)
    assert sidecar.post("/gc/windows/run-1/close", {})[0] == 200
    done = subprocess.run(
        [*COMMAND, "export", "--full", "--out", str(tmp_path / "gc.json")],
        env=environment(sidecar.url),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    slices = trace_events(json.loads((tmp_path / "gc.json").read_text(), parse_float=Decimal))
    status, pauses = sidecar.get("/gc/pauses?gc_generation=2&limit=10000")
    assert status == 200

    def exactly(each: dict[str, Any]) -> tuple[Any, ...]:
        generation, cause = each["gc_generation"], each["trigger"]
        return each["pid"], f"GC gen{generation} {cause}", round(each["duration_s"] * 1e9)

    found = [each for each in slices if each["cat"] == "gc"]
    assert Counter(
        (each["pid"], each["name"], int(each["dur"] * 1000)) for each in found
    ) == Counter(map(exactly, pauses["pauses"]))
    begun = {exactly(each): datetime.fromisoformat(_iso(each)) for each in pauses["pauses"]}
    for each in found:
        told = begun[each["pid"], each["name"], int(each["dur"] * 1000)]
        # The sidecar derives the date anew for each answer, and tells it to the millisecond.
        off = EPOCH + timedelta(microseconds=float(each["ts"])) - told
        assert abs(off) <= timedelta(milliseconds=2)
        assert each["args"]["collected_objects"] >= 0
    ids = {each["id"] for each in sidecar.get("/gc/operations")[1]["operations"]}
    assert {each["args"]["id"] for each in slices if each["cat"] == "operation"} == ids != set()
    (window,) = [each for each in slices if each["cat"] == "window"]
    assert window["name"] == "run-1: NOT clean"
    assert any(reason.startswith("maintained") for reason in window["args"]["reasons"])
    # What happened at the same time lies above one another.
    inside = [each for each in found if window["ts"] < each["ts"] < window["ts"] + window["dur"]]
    assert len(inside) == PROCESSES
