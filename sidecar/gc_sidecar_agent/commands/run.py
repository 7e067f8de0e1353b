"""`gc-sidecar run`: run a benchmark under a GC policy, judge whether GC spoiled it, and leave the engine as found.

Here are its flags and the order of its steps; `fleet` talks to the sidecars, `supervise` keeps the command, and
`report` writes down what came of it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from gc_sidecar_agent.client import DEFAULT_URL, Client, read_token
from gc_sidecar_agent.command import DEFAULT_BUDGET_MS, MINIMUM_BUDGET_MS
from gc_sidecar_agent.commands.options import (
    PREFIX,
    UNITS_NOTE,
    add_option,
    add_switch,
    address,
    duration,
    duration_with_unit,
    size,
    warn,
)
from gc_sidecar_agent.fleet import (
    LOST_CODES,
    Fleet,
    FleetError,
    Member,
    addresses,
    why_not_ready,
)
from gc_sidecar_agent.observe import ClientPauses, environment_of_observed, read_pauses
from gc_sidecar_agent.report import CLEAN, Run, Verdict, document, judge, verdict_line
from gc_sidecar_agent.supervise import (
    EXIT_OURS,
    EXIT_SIGNAL,
    EXIT_TIMEOUT,
    Ending,
    ExecError,
    Interrupted,
    Supervisor,
    Work,
    signals_waited_for,
)

POLICIES = ("off", "freeze", "budget")
EXIT_NOT_CLEAN = 123
DEFAULT_LEASE_S, LEAST_LEASE_S = 120.0, 10.0
DEFAULT_ENGINE_TIMEOUT_S, DEFAULT_KILL_AFTER_S = 45 * 60.0, 10.0
# How often it is looked whether the engine is ready, and how often it is said that it is not.
LOOK_S, TELL_S = 1.0, 15.0
# A name has all of its addresses when so many looks in a row found the same.
STEADY_LOOKS = 3
# What Kubernetes keeps of a termination message.
MAXIMUM_VERDICT_BYTES = 4096

DESCRIPTION = """\
Run COMMAND (a benchmark) under a GC policy and say whether GC spoiled what it measured. It waits for
the engine, enters the policy in every process, opens a measured window, runs the command and renews
the lease meanwhile, closes the window, and puts every process back as it was found, however the
command ended. If it is killed itself, the lease ends the policy.

The command's output is its own; what this says is on standard error. `--policy off` changes
nothing: it only observes and judges.
"""

EPILOG = f"""\
examples:
  gc-sidecar run -- vllm bench serve --model MODEL --port 8000              # freeze, and a verdict
  gc-sidecar run --policy off --report r.json -- ./bench.sh                 # only observe and judge
  gc-sidecar run --require-clean --max-pause 20ms --timeout 1h -- guidellm benchmark ...
  gc-sidecar run --url dns+http://vllm-gc:9470 --sidecars 8 -- aiperf ...   # 8 pods: all or none

{UNITS_NOTE}
exit codes:
  N      the command's own
  123    the command succeeded, and --require-clean was not met
  124    --timeout was over: the command was ended
  125    ours: no engine or sidecar in time, a policy not entered, the engine lost, not restored
  126    the command cannot be executed
  127    there is no such command
  128+N  signal N ended the command, or us before it began
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `run`."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.error = _usage_error(parser)  # type: ignore[method-assign,assignment]
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    policy = parser.add_argument_group("the policy")
    add_option(
        policy, "--policy", _policy, metavar="POLICY", help="off, freeze (default) or budget"
    )
    add_option(
        policy, "--pause-budget", duration_with_unit, metavar="DURATION",
        help=f"of budget (default {DEFAULT_BUDGET_MS:g}ms)",
    )  # fmt: skip
    add_option(
        policy, "--lease", duration, metavar="DURATION",
        help=f"how long the policy lasts if this is killed (default {DEFAULT_LEASE_S:g}s); renewed meanwhile",
    )  # fmt: skip
    add_option(
        policy, "--max-rss-growth-bytes", size, metavar="SIZE",
        help="a process whose memory grows by more than this restores itself",
    )  # fmt: skip
    add_option(policy, "--owner", metavar="NAME", help="whose policy it is (default: this host's)")
    verdict = parser.add_argument_group("the verdict")
    add_option(
        verdict, "--max-pause", duration_with_unit, metavar="DURATION",
        help="a longer pause is not clean (default 50ms)",
    )  # fmt: skip
    add_option(
        verdict, "--max-stall-share", _share, metavar="SHARE",
        help="the share of the time that pauses may hold up an engine (default 0.05)",
    )  # fmt: skip
    add_switch(verdict, "--require-clean", "exit with 123 where it is not clean, or not known")
    add_option(
        verdict,
        "--report",
        metavar="FILE",
        help="write everything known as JSON; - is standard output",
    )
    add_option(
        verdict, "--verdict-file", metavar="FILE",
        help="write the verdict in a line, as for a pod's termination message: /dev/termination-log",
    )  # fmt: skip
    add_switch(
        verdict, "--observe-client",
        "meter the GC of the command's own Python processes too (through PYTHONPATH)",
    )  # fmt: skip
    waiting = parser.add_argument_group("waiting")
    add_option(
        waiting, "--engine-timeout", duration, metavar="DURATION",
        help="how long to wait for sidecar and engine (default 45m)",
    )  # fmt: skip
    add_option(
        waiting, "--timeout", duration, metavar="DURATION",
        help="end the command after this (default: never)",
    )  # fmt: skip
    add_option(
        waiting, "--kill-after", duration, metavar="DURATION",
        help=f"how long it then has between SIGTERM and SIGKILL (default {DEFAULT_KILL_AFTER_S:g}s)",
    )  # fmt: skip
    sidecars = parser.add_argument_group("the sidecars")
    sidecars.add_argument(
        "--url", action="append", metavar="URL",
        help=f"the sidecar's control listener (default {DEFAULT_URL}); several are all or none;"
        " dns+http://NAME:9470 is every address of a headless Service",
    )  # fmt: skip
    add_option(
        sidecars, "--sidecars", _positive, metavar="N",
        help="wait until there are so many (default: what a name has when it does not change any more)",
    )  # fmt: skip
    add_option(
        sidecars, "--token-file", metavar="FILE",
        help="a file with the bearer token, where they ask for one",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    try:
        urls = args.url or _urls_of_environment() or [DEFAULT_URL]
        token = read_token(args.token_file) if args.token_file else None
        _check(args, command, urls)
    except (argparse.ArgumentTypeError, ValueError, OSError) as error:
        warn(f"run: {error}")
        return EXIT_OURS
    with signals_waited_for() as supervisor:
        return _Job(args, command, urls, token, supervisor).run()


class _Job:
    """One run from its beginning to its end."""

    def __init__(
        self,
        args: argparse.Namespace,
        command: Sequence[str],
        urls: Sequence[str],
        token: str | None,
        supervisor: Supervisor,
    ) -> None:
        self._args = args
        self._command = command
        self._urls = urls
        self._token = token
        self._supervisor = supervisor
        self._policy = args.policy or "freeze"
        self._budget_ms = _budget_ms(args, self._policy)
        self._window_id = f"run-{time.time_ns()}"
        self._owner = args.owner or f"run-{socket.gethostname()[:80]}-{os.getpid()}"
        self._lease_s = args.lease or DEFAULT_LEASE_S
        self._fleet = Fleet((), self._owner, self._lease_s)
        self._limits = {
            "max_pause_ms": None if args.max_pause is None else 1000 * args.max_pause,
            "max_stall_share": args.max_stall_share,
        }
        self._preparing: Work[None] | None = None
        self._client_file: str | None = None

    def run(self) -> int:
        """The steps in their order; whatever fails, what was changed is put back."""
        began_s = time.time()
        started_s: float | None = None
        ending: Ending | None = None
        failure: str | None = None
        exit_code = EXIT_OURS
        try:
            environment = self._environment()
            members = self._wait_for_engines()
            self._fleet = Fleet(members, self._owner, self._lease_s)
            self._preparing = Work(self._prepare)
            self._supervisor.wait(self._preparing)
            self._fleet.keep(self._window_id)
            started_s = time.time()
            ending = self._supervisor.run(
                self._command,
                environment,
                self._args.timeout,
                DEFAULT_KILL_AFTER_S if self._args.kill_after is None else self._args.kill_after,
                lambda: self._fleet.lost,
            )
            exit_code = ending.exit_code
            if ending.stopped_because is not None:
                exit_code, failure = EXIT_OURS, ending.stopped_because
            elif ending.timed_out:
                exit_code = EXIT_TIMEOUT
                failure = f"--timeout of {self._args.timeout:g} s is over"
        except Interrupted as interrupted:
            exit_code, failure = EXIT_SIGNAL + interrupted.number, f"ended by {interrupted}"
        except ExecError as error:
            exit_code, failure = error.exit_code, str(error)
        except (FleetError, TimeoutError, ValueError) as error:
            failure = str(error)
        except Exception as error:  # whatever it is, the engine is put back first
            failure = f"{type(error).__name__}: {error}"
        ended_s = time.time()
        if failure is not None:
            _tell(failure)
        self._finish()
        run = Run(
            command=self._command,
            policy=self._policy,
            pause_budget_ms=self._budget_ms,
            limits=self._limits_in_force(),
            window_id=self._window_id,
            began_s=began_s,
            started_s=started_s,
            ended_s=ended_s,
            ending=ending,
            failure=failure,
            exit_code=exit_code,
        )
        return self._conclude(run)

    # --- before ---

    def _wait_for_engines(self) -> list[Member]:
        """Every sidecar, its engine ready. Raises TimeoutError, Interrupted, ValueError."""
        timeout_s = (
            DEFAULT_ENGINE_TIMEOUT_S
            if self._args.engine_timeout is None
            else self._args.engine_timeout
        )
        began_s = time.monotonic()
        told_s, told, found, steady = -TELL_S, "", [("", None)], 0
        while True:
            now_s = time.monotonic() - began_s
            why, known = self._supervisor.wait(Work(self._look))
            steady, found = (steady + 1 if known == found else 0), known
            if why is None and steady < self._looks_needed:
                why = f"{len(known)} sidecars have an address, and there may be more (--sidecars N)"
            if why is None:
                if told:
                    _tell(f"the engine is ready after {now_s:.0f} s")
                return self._members(known)
            if now_s >= timeout_s:
                raise TimeoutError(
                    f"no engine was ready within {timeout_s:g} s (--engine-timeout): {why}"
                )
            if why is not None and (why != told or now_s - told_s >= TELL_S):
                _tell(f"waiting for the engine ({now_s:.0f} of {timeout_s:.0f} s): {why}")
                told_s, told = now_s, why
            self._supervisor.sleep(min(LOOK_S, max(0.0, timeout_s - now_s)))

    @property
    def _looks_needed(self) -> int:
        """Whether pods are still to come nobody can tell but by looking again."""
        is_name = any(url.startswith("dns+") for url in self._urls)
        return STEADY_LOOKS if is_name and self._args.sidecars is None else 0

    def _look(self) -> tuple[str | None, list[Any]]:
        try:
            found = addresses(self._urls)
        except OSError as error:
            return f"{', '.join(self._urls)}: {error.strerror or error}", []
        wanted = self._args.sidecars or 1
        if len(found) < wanted:
            return f"{len(found)} of {wanted} sidecars have an address", found
        return why_not_ready(self._members(found)), found

    def _members(self, found: Sequence[tuple[str, str | None]]) -> list[Member]:
        return [Member(Client(url, self._token, host)) for url, host in found]

    def _prepare(self) -> None:
        """Policy and window, in every engine or in none. Raises FleetError."""
        self._fleet.look()
        if self._policy != "off":
            self._fleet.enter(
                self._policy,
                pause_budget_ms=self._budget_ms,
                max_rss_growth_bytes=self._args.max_rss_growth_bytes,
            )
        # It is asked for every few seconds; where this is killed, nobody else would close it.
        self._fleet.open_windows(
            self._window_id, name=self._name(), abandon_after_s=self._lease_s, **self._limits
        )
        where = (
            f"{len(self._fleet.members)} engines" if len(self._fleet.members) > 1 else "the engine"
        )
        _tell(f"{where} under {self._policy}; running {self._command[0]}")

    def _name(self) -> str:
        name = f"gc-sidecar run {os.path.basename(self._command[0])}"[:128]
        return "".join(letter if letter.isprintable() else "?" for letter in name)

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if not self._args.observe_client:
            return environment
        descriptor, self._client_file = tempfile.mkstemp(prefix="gc-sidecar-client-")
        os.close(descriptor)
        return environment_of_observed(environment, self._client_file)

    # --- after ---

    def _finish(self) -> None:
        """Close and restore. A signal does not keep us from it: who is in more haste has SIGKILL."""

        def finish() -> None:
            try:
                self._fleet.close_windows(self._window_id)
            finally:
                self._fleet.restore()

        if not self._fleet.members:
            return
        self._fleet.give_up()
        # What it has asked for may still come to pass, and has to come before what undoes it.
        if self._preparing is not None:
            self._wait_whatever_comes(self._preparing)
        self._wait_whatever_comes(Work(finish))

    def _wait_whatever_comes(self, work: Work[None]) -> None:
        while True:
            try:
                self._supervisor.wait(work)
            except Interrupted as interrupted:
                _tell(f"{interrupted}: putting the engine back first")
                continue
            except Exception as error:
                if not isinstance(error, FleetError):
                    _tell(f"{type(error).__name__}: {error}")
            return

    def _limits_in_force(self) -> dict[str, Any]:
        """Those of the windows: a sidecar knows the defaults of what was not asked for."""
        for member in self._fleet.members:
            if member.window:
                return dict(member.window["limits"])
        return self._limits

    def _conclude(self, run: Run) -> int:
        verdict = judge(self._fleet, run)
        not_restored = [reason for reason in verdict.reasons if reason.code == "not_restored"]
        code = run.exit_code
        is_lost = any(reason.code in LOST_CODES for reason in verdict.reasons)
        if code == 0 and (not_restored or is_lost):
            code = EXIT_OURS
        elif code == 0 and self._args.require_clean and verdict.state != CLEAN:
            code = EXIT_NOT_CLEAN
        run = Run(**{**vars(run), "exit_code": code})
        client = self._client_pauses()
        for member in self._fleet.members:
            # A benchmark whose requests all failed is clean, too: here it shows.
            says = (member.window.get("verdict") or {}).get("latency", {}).get("says")
            if says:
                _tell(f"{member.url}: tokens: {says}")
        for reason in verdict.reasons[1:]:
            _tell(f"{reason.code}: {reason.detail}")
        line = verdict_line(verdict, run)
        _tell(line)
        self._write(run, verdict, client, line)
        return code

    def _client_pauses(self) -> ClientPauses | None:
        if self._client_file is None:
            return None
        try:
            client = read_pauses(self._client_file)
            os.unlink(self._client_file)
        except OSError:
            return None
        longest = max((pause.duration_s for pause in client.pauses), default=0.0)
        _tell(
            f"the command's own GC: {len(client.pauses)} pauses of at least 0.5 ms in {client.processes} Python"
            f" processes, the longest {1000 * longest:.1f} ms"
        )
        return client

    def _write(self, run: Run, verdict: Verdict, client: ClientPauses | None, line: str) -> None:
        if self._args.verdict_file:
            # In the terms of what is printable, for a command's name may be anything.
            told = line.encode(errors="backslashreplace")
            cut = told[: MAXIMUM_VERDICT_BYTES - 1].decode(errors="ignore")
            _write_file("--verdict-file", self._args.verdict_file, f"{cut}\n")
        if self._args.report:
            text = json.dumps(document(self._fleet, run, verdict, client), indent=1)
            _write_file("--report", self._args.report, f"{text}\n")


def _usage_error(parser: argparse.ArgumentParser) -> Callable[[str], NoReturn]:
    """argparse ends with 2, which would look like the command's own status."""

    def error(message: str) -> NoReturn:
        parser.print_usage(sys.stderr)
        parser.exit(EXIT_OURS, f"gc-sidecar: run: {message}\n")

    return error


def _write_file(flag: str, path: str, text: str) -> None:
    """Write it, to standard output where the path is -. What could not be written stands in the log."""
    if path == "-" and sys.stdout is None:
        _tell(f"{flag} {path}: standard output is closed")
        return
    try:
        # Without a buffer of Python's, which would fail a second time at the end, and change the exit code.
        with open(1 if path == "-" else path, "wb", buffering=0, closefd=path != "-") as file:
            left = memoryview(text.encode(errors="backslashreplace"))
            while left:
                left = left[file.write(left) :]
    except OSError as error:
        _tell(f"{flag} {path}: {error.strerror}")
        if flag == "--report":
            _tell(text)


def _tell(line: str) -> None:
    warn(f"run: {line}")


def _check(args: argparse.Namespace, command: Sequence[str], urls: Sequence[str]) -> None:
    if not command:
        raise ValueError("there is no command to run: gc-sidecar run [FLAGS] -- COMMAND ...")
    if args.pause_budget is not None and (args.policy or "freeze") != "budget":
        raise ValueError("--pause-budget belongs to --policy budget")
    if args.pause_budget is not None and 1000 * args.pause_budget < MINIMUM_BUDGET_MS:
        raise ValueError(f"--pause-budget must be at least {MINIMUM_BUDGET_MS:g}ms")
    if args.timeout is not None and args.timeout <= 0:
        raise ValueError(
            "--timeout must be more than 0: leave it out for a command without a limit"
        )
    if args.lease is not None and args.lease < LEAST_LEASE_S:
        raise ValueError(
            f"--lease must be at least {LEAST_LEASE_S:g}s, for it is renewed over HTTP"
        )
    for url in urls:
        Client(address(url.removeprefix("dns+")))
    for flag, path in (("--report", args.report), ("--verdict-file", args.verdict_file)):
        directory = os.path.dirname(path) if path else ""
        if directory and not os.path.isdir(directory):
            raise ValueError(f"{flag} {path}: there is no directory {directory}")


def _urls_of_environment() -> list[str]:
    found = os.environ.get(f"{PREFIX}URL", "").split(",")
    return [url.strip() for url in found if url.strip()]


def _budget_ms(args: argparse.Namespace, policy: str) -> float | None:
    if policy != "budget":
        return None
    return DEFAULT_BUDGET_MS if args.pause_budget is None else 1000 * args.pause_budget


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(POLICIES)}")
    return text


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return share
