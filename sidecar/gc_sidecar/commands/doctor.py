"""`gc-sidecar doctor`, the sidecar's half: whether the run directory is shared and sound, which transport is open,
and what an earlier run left over.

It looks with the server's own eyes, asks its own questions, and leaves nothing behind. The engine's half, in
`gc_sidecar_agent.commands.doctor`, is behind `--engine-side`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gc_sidecar.server.claim import claimant
from gc_sidecar.server.desired import Desired, desired_from_board
from gc_sidecar.server.engine_http import EngineFault, ask, make_client
from gc_sidecar.server.logs import rfc3339
from gc_sidecar.server.reports import Key
from gc_sidecar.server.roster import Roster, take_roll
from gc_sidecar.server.secret import read_endpoint_token
from gc_sidecar.server.settings import Settings, SettingsError, is_loopback, load_settings
from gc_sidecar.server.sight import PageReading, Sight, Snapshot
from gc_sidecar.server.timing import Timing
from gc_sidecar.server.transports import (
    FLOOR,
    NOT_AN_ENGINE,
    Discovery,
    discover,
    is_too_old,
)
from gc_sidecar_agent import __version__ as agent_version
from gc_sidecar_agent.board import BOARD_NAME, Board, BoardError, read_board
from gc_sidecar_agent.cli import EXIT_USAGE
from gc_sidecar_agent.client import Client, ClientError, Unreachable, read_token
from gc_sidecar_agent.collector import GENERATIONAL
from gc_sidecar_agent.commands import doctor as engine_side
from gc_sidecar_agent.commands.options import add_option, add_switch, warn
from gc_sidecar_agent.doctor.findings import (
    EXIT_CODES,
    Finding,
    add_report_arguments,
    error,
    examine,
    ok,
    ourselves,
    report,
    some,
    warning,
)
from gc_sidecar_agent.doctor.run_dir_checks import PROBE_NAME, examine_run_directory
from gc_sidecar_agent.endpoint import TOKEN_NAME

DESCRIPTION = """\
Find out what keeps the sidecar from seeing and reaching its engine, and what an earlier run left over. Run it
where `gc-sidecar serve` runs, before it or beside it, with the same flags or environment.

The other half, in the engine's container, is `DIR/bin/gc-sidecar doctor`, DIR written by `gc-sidecar
install-agent`; without containers, `gc-sidecar doctor --engine-side` is the same, and only that half.

It leaves nothing behind, and calls the engine at most once: with the question for its methods, which the sidecar
asks too before it uses vLLM's dev mode.
"""

EXAMPLES = """\
examples:
  gc-sidecar doctor --run-dir /run/gc-sidecar --engine-url http://localhost:8000
  gc-sidecar doctor --run-dir /run/gc-sidecar --json | jq '.findings[] | select(.level != "ok")'
  gc-sidecar doctor --engine-side --agent-dir /opt/gc-agent
"""

FLAGS = ("engine_url", "run_dir", "engine_token_file", "token_file")

TIMING = Timing()
LOOK_AGAIN_S = 0.5
PAGES_UNKNOWN = 16
# A file under a temporary name lives for milliseconds.
LEFT_OVER_S = 60.0
RECENT_S = 60.0
LISTEN = "0A"
LOOPBACK_ADDRESSES = re.compile(
    r"[0-9A-F]{6}7F|0{24}01000000|0{16}FFFF0000[0-9A-F]{6}7F"  # 127/8, ::1, ::ffff:127/104
)


@dataclass(frozen=True)
class EngineAnswer:
    """What one engine said. `dev_open` is whether it has vLLM's own /collective_rpc."""

    url: str
    discovery: Discovery
    dev_open: bool


@dataclass(frozen=True)
class ListenerAnswer:
    """What answers at the control listener's address: `kind` is nobody, sidecar or other."""

    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What a check may look at."""

    settings: Settings
    url: str
    listener: ListenerAnswer
    engines: tuple[EngineAnswer, ...]
    snapshot: Snapshot
    roster: Roster
    board: Board | None
    board_fault: str | None
    claimant: str | None

    @property
    def run_dir(self) -> str | None:
        """The run directory, if it can be looked into."""
        path = self.settings.run_dir
        return path if path is not None and os.path.isdir(path) else None

    @property
    def living(self) -> list[PageReading]:
        """The pages of processes that run."""
        return [page for page in self.snapshot.pages if page.alive]

    @property
    def is_reachable(self) -> bool:
        """Whether some engine answers HTTP."""
        return any(
            engine.discovery.reachable
            and NOT_AN_ENGINE not in [each.code for each in engine.discovery.obstacles]
            for engine in self.engines
        )

    @property
    def has_ready_api_server(self) -> bool:
        """Whether an API server has a page that says it has finished its start-up."""
        return any(
            page.report.state.ready and "api_server" in page.report.identity.roles
            for page in self.living
        )


# --- the verb ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of both halves."""
    parser.description = DESCRIPTION
    parser.epilog = f"{EXAMPLES}\n{EXIT_CODES}"
    add_report_arguments(parser)
    ours: Any = parser.add_argument_group("the sidecar's half, as for `gc-sidecar serve`")
    ours.add_argument(
        "--engine-url", action="append", metavar="URL", help="the engine's own address"
    )
    ours.add_argument("--run-dir", metavar="DIR", help="the directory that both containers share")
    ours.add_argument(
        "--engine-token-file", metavar="FILE", help="the secret of our endpoint plugin"
    )
    add_option(
        ours,
        "--url",
        metavar="URL",
        help="where the sidecar listens, or will (default http://localhost:9470)",
    )
    ours.add_argument("--token-file", metavar="FILE", help="the bearer token of that listener")
    theirs: Any = parser.add_argument_group("the engine's half")
    add_switch(
        theirs, "--engine-side", "examine the engine's environment instead", environment=False
    )
    engine_side.add_engine_arguments(theirs)


def run(args: argparse.Namespace) -> int:
    """Examine, print, return the exit code."""
    if args.engine_side:
        return engine_side.run(args)
    try:
        settings = load_settings({name: getattr(args, name, None) for name in FLAGS})
        if settings.run_dir is None and not settings.engine_url:
            raise SettingsError(
                "name the run directory (--run-dir), the engine (--engine-url), or both"
            )
        url = args.url or _control_url(settings)
        token = read_token(settings.token_file) if settings.token_file else None
        listener = ask_listener(Client(url, token))
    except OSError as failure:
        return _fail(f"--token-file {failure.filename}: {failure.strerror}")
    except ValueError as failure:  # a SettingsError is one
        return _fail(str(failure))
    surroundings = asyncio.run(survey(settings, url, listener))
    return report(examine(CHECKS, surroundings), args.json, args.fail_on)


def _fail(message: str) -> int:
    warn(f"doctor: {message}")
    return EXIT_USAGE


def _control_url(settings: Settings) -> str:
    host, port = settings.control_address
    host = host.strip("[]")
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def survey(settings: Settings, url: str, listener: ListenerAnswer) -> Surroundings:
    """Everything that the checks look at, gathered once."""
    asked = asyncio.gather(*(_ask_engine(each, settings) for each in settings.engine_url))
    snapshot = await asyncio.to_thread(_look, settings.run_dir)
    board, fault = _read_board(settings.run_dir)
    return Surroundings(
        settings=settings,
        url=url,
        listener=listener,
        engines=tuple(await asked),
        snapshot=snapshot,
        roster=take_roll(snapshot, (), Desired(), {}, TIMING.stale_after_s),
        board=board,
        board_fault=fault,
        claimant=claimant(settings.run_dir) if settings.run_dir is not None else None,
    )


def _look(run_dir: str | None) -> Snapshot:
    """The pages, looked at until each living one has moved, or has stood still for long enough to say so."""
    if run_dir is None or not os.path.isdir(run_dir):
        return Snapshot()
    sight = Sight(run_dir)
    sight.read()
    ends = time.monotonic() + TIMING.stale_after_s + LOOK_AGAIN_S
    while True:
        time.sleep(LOOK_AGAIN_S)
        snapshot = sight.read()
        still = [page for page in snapshot.pages if page.alive and page.unchanged_s > 0]
        if not still or time.monotonic() >= ends:
            return snapshot


def _read_board(run_dir: str | None) -> tuple[Board | None, str | None]:
    if run_dir is None:
        return None, None
    try:
        return read_board(run_dir), None
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except BoardError as failure:
        return None, str(failure)
    except OSError as failure:
        return None, failure.strerror or str(failure)


async def _ask_engine(url: str, settings: Settings) -> EngineAnswer:
    def secret() -> str | None:
        return read_endpoint_token(settings.run_dir, settings.engine_token_file)

    async with make_client() as http:
        discovery = await discover(http, url, secret, TIMING.question_s)
        dev_open = False
        if discovery.reachable:
            try:
                # It takes POST alone, so this tells that it is there and calls nothing.
                answer = await ask(http, "GET", f"{url}/collective_rpc", TIMING.question_s)
                dev_open = answer.status == 405
            except EngineFault:
                pass
    return EngineAnswer(url, discovery, dev_open)


def ask_listener(client: Client) -> ListenerAnswer:
    """Who answers where the sidecar listens, or is going to."""
    try:
        body = client.request("GET", "/version", timeout_s=TIMING.question_s).body
    except Unreachable as failure:
        kind = "nobody" if failure.code == "unreachable" else "other"
        return ListenerAnswer(kind, failure.detail)
    except ClientError as failure:
        kind = "other" if failure.code == "not_a_sidecar" else "sidecar"
        return ListenerAnswer(kind, failure.detail)
    if "agents" not in body:  # an engine has a /version too
        return ListenerAnswer("other", f"what answers at {client.url} is no gc-sidecar")
    return ListenerAnswer("sidecar", f"version {body.get('version')}")


# --- the checks: the run directory ---


def check_run_directory(around: Surroundings) -> Iterator[Finding]:
    path = around.settings.run_dir
    if path is None:
        yield warning(
            "run_dir",
            "there is no --run-dir: no page is seen, no board can be written, and all that is known is what"
            " the engine replies",
            "share a memory volume with the engine, and name it: --run-dir DIR and GC_SIDECAR_RUN_DIR=DIR",
        )
        return
    yield from examine_run_directory(path, around.roster.expected or PAGES_UNKNOWN)


def check_pages(around: Surroundings) -> Iterator[Finding]:
    if around.run_dir is None:
        return
    living = around.living
    if living:
        twice = _twice(living)
        if twice:
            yield error(
                "pages",
                f"two living processes call themselves {twice[0]}: two engines share {around.run_dir}",
                "give each engine a run directory, and a sidecar, of its own",
            )
        else:
            yield ok("pages", f"{len(living)} living processes have a page")
    elif around.is_reachable:
        yield error(
            "pages",
            f"the engine answers, and no process of it has a page in {around.run_dir}",
            "mount one volume into both containers, set GC_SIDECAR_RUN_DIR to it in the engine's, and run"
            " `DIR/bin/gc-sidecar doctor` there: it tells whether the agent is loaded",
        )
    elif around.settings.engine_url:
        yield ok("pages", "no process has a page, and no engine answers yet")
    else:
        yield warning(
            "pages",
            f"no living process has a page in {around.run_dir}",
            "start the engine; if it runs, run `DIR/bin/gc-sidecar doctor` in its container",
        )


def _twice(living: Sequence[PageReading]) -> list[Key]:
    counted = Counter(key for page in living for key in page.report.identity.keys)
    return sorted(key for key, times in counted.items() if times > 1)


def check_coverage(around: Surroundings) -> Iterator[Finding]:
    if not around.living:
        return
    rows = around.roster.rows
    lost = [row for row in rows if row.state in ("uncovered", "gone")]
    is_ready = all(page.report.state.ready for page in around.living)
    if lost and is_ready:
        reason = f": {lost[0].reason}" if lost[0].reason else ""
        yield error(
            "coverage",
            f"{len(lost)} of {len(rows)} expected processes show nothing ({some([r.key for r in lost])})"
            f"{reason}",
            "every process of the engine needs the agent and the run directory: start all of it with"
            " `DIR/bin/with-agent`, and run `DIR/bin/gc-sidecar doctor` there",
        )
    elif not is_ready:
        yield warning(
            "coverage",
            f"the engine has not finished its start-up: {len(rows) - len(lost)} of {len(rows)} processes are"
            " there",
            "wait, then run doctor again; nothing is applied before that",
        )
    else:
        yield ok("coverage", f"all {len(rows)} expected processes have a page")


def check_stale_pages(around: Surroundings) -> Iterator[Finding]:
    stale = [
        page
        for page in around.living
        if page.unchanged_s >= TIMING.stale_after_s and page.collecting_s is None
    ]
    if stale:
        yield warning(
            "pages_stale",
            f"no heartbeat for {stale[0].unchanged_s:.0f} s from {_places(stale)}: stopped, or wedged",
            "look at the process (is it stopped? does the run directory still take writes?), and restart the"
            " engine if it stays so",
        )


def check_dead_pages(around: Surroundings) -> Iterator[Finding]:
    dead = [page for page in around.snapshot.pages if not page.alive]
    if dead:
        yield warning(
            "pages_dead",
            f"{len(dead)} pages are left over from processes that have ended: {_places(dead)}",
            "they go when a process takes their place; otherwise"
            f" {_removal([os.path.join(around.run_dir or '', page.name) for page in dead])}",
        )


def check_unreadable_pages(around: Surroundings) -> Iterator[Finding]:
    for page in around.snapshot.unreadable[:4]:
        path = os.path.join(around.run_dir or "", page.name)
        yield warning(
            "pages_unreadable",
            f"{page.name}: {page.detail} ({page.code})",
            "install the agent and the sidecar from one release, and restart the engine"
            if page.code == "page_version"
            else f"if no process of the engine writes it, remove it: rm {path}",
        )


def check_agents(around: Surroundings) -> Iterator[Finding]:
    """What the pages say that concerns us."""
    for page in around.living:
        identity, state = page.report.identity, page.report.state
        place = identity.keys[0]
        if identity.agent is not None and identity.agent != agent_version:
            yield warning(
                "agent_version",
                f"{place} runs agent {identity.agent}; this sidecar is made for {agent_version}",
                "run `gc-sidecar install-agent DIR` of this release, and restart the engine",
            )
        if identity.collector not in (None, GENERATIONAL):
            yield error(
                "collector",
                f"freeze and budget are refused in {place}: CPython {identity.python} has the"
                f" {identity.collector} collector",
                "use an image with CPython 3.10 to 3.13, or 3.14.5 and later",
            )
        if identity.agent_error:
            yield warning(
                "agents",
                f"{place}: {identity.agent_error}",
                "see `gc-sidecar status`; if it stays, restart the engine and report it",
            )
        if state.refused is not None:
            yield warning(
                "agents",
                f"{place} refused a policy: {state.refused}",
                "do what the reason says, then send the policy again",
            )


# --- the checks: left over ---


def check_temporary_files(around: Surroundings) -> Iterator[Finding]:
    if around.run_dir is None:
        return
    left = []
    for name in sorted(os.listdir(around.run_dir)):
        path = os.path.join(around.run_dir, name)
        try:
            age_s = time.time() - os.lstat(path).st_mtime
        except OSError:
            continue
        if name.endswith(".tmp") and (age_s >= LEFT_OVER_S or PROBE_NAME.fullmatch(name)):
            left.append(path)
    if left:
        yield warning(
            "temporary_files",
            f"{len(left)} temporary files are left over from writers that were killed",
            _removal(left),
        )


def check_board(around: Surroundings) -> Iterator[Finding]:
    if around.run_dir is None:
        return
    path = os.path.join(around.run_dir, BOARD_NAME)
    is_served = around.listener.kind == "sidecar"
    if around.board_fault is not None:
        yield error(
            "board",
            f"the board cannot be read, and no agent follows it: {around.board_fault}",
            f"remove it (rm {path}) and restart the sidecar",
        )
        return
    if around.board is None:
        yield ok("board", "there is no board yet: nothing is left over from an earlier sidecar")
        return
    desired, policy, lease = (
        desired_from_board(around.board),
        around.board.policy,
        around.board.lease,
    )
    if policy is not None and policy.kind != "restore" and not desired.is_on:
        ended = f" at {rfc3339(lease.expires_at)}" if lease is not None else ""
        yield warning(
            "board",
            f"{policy.kind} by {policy.owner} is left over on the board; its lease ended{ended}, and the agents"
            " have ended it themselves",
            f"start the sidecar, which tidies up; or remove the board: rm {path}",
        )
    elif desired.is_on and around.claimant is not None:
        yield ok("board", f"{desired.mode} by {desired.owner} is in force")
    elif desired.is_on and not is_served:
        ends = rfc3339(desired.lease_expires_at() or 0.0)
        yield warning(
            "board",
            f"{desired.mode} by {desired.owner} is in force until {ends}, and"
            f" no sidecar answers at {around.url}",
            "start the sidecar, which takes it over, then `gc-sidecar restore --force`; or let the lease end",
        )
    elif desired.is_on:
        yield ok("board", f"{desired.mode} by {desired.owner} is in force, and the sidecar answers")
    else:
        yield ok("board", "no policy is wanted")


def check_other_sidecar(around: Surroundings) -> Iterator[Finding]:
    """Who else uses the run directory?"""
    if around.run_dir is None or around.listener.kind == "sidecar":
        return
    if around.claimant is not None:
        yield warning(
            "other_sidecar",
            f"{around.run_dir} belongs to {around.claimant}, and nobody answers at {around.url}",
            "if that is yours, say where it listens: --url; else stop it, or use another directory",
        )
        return
    try:
        status = os.lstat(os.path.join(around.run_dir, BOARD_NAME))
    except OSError:
        return
    age_s = time.time() - status.st_mtime
    if 0 <= age_s < RECENT_S:
        yield warning(
            "other_sidecar",
            f"a sidecar (user {status.st_uid}) wrote the board within the last minute ({age_s:.0f} s ago), and"
            f" none answers at {around.url}: it has stopped since, or another one uses this directory",
            "nothing, if you have just stopped yours; else run one sidecar for each run directory, and if yours"
            " listens elsewhere, say where: --url",
        )


def check_endpoint_token(around: Surroundings) -> Iterator[Finding]:
    """Whether the engine can read the secret, as far as its pages tell which user it is."""
    if around.run_dir is None or around.settings.engine_token_file is not None:
        return
    path = os.path.join(around.run_dir, TOKEN_NAME)
    try:
        status, directory = os.lstat(path), os.stat(around.run_dir)
    except FileNotFoundError:
        yield ok("endpoint_token", "not there yet: `gc-sidecar serve` writes it")
        return
    mode = stat.S_IMODE(status.st_mode)
    described = f"mode {mode:04o}, user {status.st_uid}, group {status.st_gid}"
    anew = f"remove it and restart the sidecar, which writes it anew: rm {path}"
    engine_users = _engine_users(around)
    for_group = bool(mode & 0o040) and status.st_gid == directory.st_gid
    if read_endpoint_token(around.run_dir, None) is None:
        yield error(
            "endpoint_token",
            f"{ourselves()} cannot read {path} ({described}), or it holds no secret",
            anew,
        )
    elif mode & 0o007:
        yield warning(
            "endpoint_token", f"anybody can read {path} ({described})", f"chmod 640 {path}"
        )
    elif not for_group and (not engine_users or engine_users - {0, status.st_uid}):
        users = f"user {', '.join(map(str, sorted(engine_users)))}" if engine_users else "its user"
        yield (error if engine_users else warning)(
            "endpoint_token",
            f"the engine ({users}) cannot read {path} ({described}): it is not for the directory's group"
            f" {directory.st_gid}",
            f"give the pod an fsGroup; or: chmod 2770 {around.run_dir}, then {anew}",
        )
    else:
        yield ok("endpoint_token", f"the engine can read it ({described})")


def _engine_users(around: Surroundings) -> set[int]:
    users = set()
    for page in around.living:
        try:
            users.add(os.lstat(os.path.join(around.run_dir or "", page.name)).st_uid)
        except OSError:
            continue
    return users


# --- the checks: the engine and the listener ---


def check_engines(around: Surroundings) -> Iterator[Finding]:
    if not around.engines:
        yield ok("transport", "board: no --engine-url is given, so no HTTP goes into the engine")
        return
    for engine in around.engines:
        codes = [obstacle.code for obstacle in engine.discovery.obstacles]
        if engine.discovery.reachable and NOT_AN_ENGINE not in codes:
            yield from _check_version(engine)
            yield from _check_transport(engine, around)
            yield from _check_dev_mode(engine)
            continue
        obstacle = engine.discovery.obstacles[0]
        if NOT_AN_ENGINE in codes:
            yield error("engine", obstacle.detail, obstacle.remedy or "correct --engine-url")
            continue
        if "engine_unreachable" in codes and around.has_ready_api_server:
            yield error(
                "engine",
                f"nobody listens at {engine.url}, and the engine runs: its API server's page says that it is"
                " ready, so this is not its port",
                "give the port that the engine serves on (vLLM's --port): --engine-url; where it has become"
                " ready just now, ask once more",
            )
            continue
        make = warning if around.living else error
        instead = "; the board is used meanwhile" if around.living else ""
        yield make(
            "engine",
            f"{engine.url} does not answer: {obstacle.detail}{instead}",
            obstacle.remedy or "start the engine, or correct --engine-url",
        )


def _check_version(engine: EngineAnswer) -> Iterator[Finding]:
    version = engine.discovery.version
    if version is None:
        yield ok("engine", f"{engine.url} answers, and tells no version")
    elif is_too_old(version):
        floor = f"{FLOOR[0]}.{FLOOR[1]}"
        yield error(
            "engine_version",
            f"{engine.url} is vLLM {version}, older than {floor}: nothing is sent to it",
            f"use vLLM {floor} or later",
        )
    else:
        # An engine that is not vLLM says its name, too.
        yield ok("engine", f"{engine.url} is {version if ' ' in version else f'vLLM {version}'}")


def _check_transport(engine: EngineAnswer, around: Surroundings) -> Iterator[Finding]:
    discovery = engine.discovery
    if discovery.transport is not None:
        yield ok("transport", f"{discovery.transport.name} at {engine.url}")
        return
    codes = [each.code for each in discovery.obstacles]
    if codes == ["engine_too_old"]:
        return
    run_dir = around.run_dir
    if (
        "endpoint_token_missing" in codes
        and run_dir is not None
        and not os.path.lexists(os.path.join(run_dir, TOKEN_NAME))
    ):
        yield ok("transport", f"plugin at {engine.url}, once the sidecar has written its secret")
        return
    described = "; ".join(each.detail for each in discovery.obstacles)
    serious = run_dir is None or "agent_not_loaded" in codes
    yield (error if serious else warning)(
        "transport",
        f"{'board' if run_dir is not None else 'none'}: no RPC goes to {engine.url}: {described}",
        discovery.obstacles[0].remedy or "share a run directory with the engine: --run-dir",
    )


def _check_dev_mode(engine: EngineAnswer) -> Iterator[Finding]:
    if not engine.dev_open:
        yield ok("dev_mode", "vLLM's dev mode is off")
    elif is_bound_to_loopback(engine.url):
        yield ok("dev_mode", "dev mode is on, and the engine listens on loopback alone")
    else:
        yield warning(
            "dev_mode",
            f"dev mode is on at {engine.url}: /collective_rpc takes any method from anybody who reaches the"
            " port",
            "bind vLLM to this pod alone (--host 127.0.0.1), or use the endpoint plugin (vLLM 0.28 and later)"
            " and unset VLLM_SERVER_DEV_MODE",
        )


def is_bound_to_loopback(url: str) -> bool:
    """Whether the engine at `url`, which shares our network, listens on loopback addresses only."""
    parts = urlsplit(url)
    if not is_loopback(parts.hostname or ""):
        return False
    port = parts.port or (443 if parts.scheme == "https" else 80)
    addresses = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            address, _, its_port = fields[1].partition(":")
            if fields[3] == LISTEN and int(its_port, 16) == port:
                addresses.append(address)
    return bool(addresses) and all(LOOPBACK_ADDRESSES.fullmatch(each) for each in addresses)


def check_listener(around: Surroundings) -> Iterator[Finding]:
    listener = around.listener
    if listener.kind == "other":
        yield error(
            "listener",
            f"the address of the sidecar is taken: {listener.detail}",
            "serve on another port (--port, GC_SIDECAR_PORT), or end what listens there",
        )
    elif listener.kind == "sidecar":
        yield ok("listener", f"a sidecar answers at {around.url}: {listener.detail}")
    else:
        yield ok("listener", f"nobody listens at {around.url}: a sidecar can")


def _places(pages: Sequence[PageReading]) -> str:
    return some([page.report.identity.keys[0] for page in pages])


def _removal(paths: Sequence[str], most: int = 4) -> str:
    if len(paths) > most:
        return f"remove them: {some(paths, most)}"
    return f"remove them: rm {' '.join(paths)}"


CHECKS: tuple[Callable[[Surroundings], Iterator[Finding]], ...] = (
    check_run_directory,
    check_pages,
    check_coverage,
    check_stale_pages,
    check_dead_pages,
    check_unreadable_pages,
    check_agents,
    check_temporary_files,
    check_board,
    check_other_sidecar,
    check_endpoint_token,
    check_engines,
    check_listener,
)
