"""`gc-sidecar window`: open and close a measured window, for harnesses that `gc-sidecar run` cannot start.

Here is also how windows and verdicts look as text, for these verbs and for `?format=table` of the routes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gc_sidecar_agent.cli import EXIT_FAILED, EXIT_OK
from gc_sidecar_agent.commands.options import (
    ASKING_CODES,
    add_client_arguments,
    add_option,
    add_switch,
    describe,
    duration_with_unit,
)
from gc_sidecar_agent.commands.options import size as size_option
from gc_sidecar_agent.commands.output import (
    UNKNOWN,
    change,
    count,
    perform,
    role,
    rows_of,
    seconds,
    size,
    table,
    word,
)
from gc_sidecar_agent.commands.pauses import pause_table

if TYPE_CHECKING:
    from gc_sidecar_agent.client import Answer, Client

DESCRIPTION = """\
A window is a measured stretch of time. `open` prints its id, `close` judges it: which pauses of the
engine fell into it, how long they held it up, and whether it is clean. `show` tells how it stands so
far. Nothing is sent to the engine.
"""

EXAMPLES = """\
  id=$(gc-sidecar window open --name sweep-7); ./bench.sh; gc-sidecar window close "$id"
  gc-sidecar window close --require-clean "$id" || echo "measure again"
  gc-sidecar window show sweep-7 --json | jq .window.verdict.reasons
"""


@dataclass(frozen=True)
class Action:
    """One action: the line that `window --help` shows, and what its own help says."""

    help: str
    description: str
    examples: str
    exit_codes: str = ASKING_CODES


ACTIONS: Mapping[str, Action] = {
    "open": Action(
        "open one, and print its id",
        """\
Open a measured window: from now on the pauses of the engine are counted in it, until it is closed. It
prints the window's id, which is yours or made up, and nothing else. At most 16 are open at once.
""",
        """\
  id=$(gc-sidecar window open)
  gc-sidecar window open sweep-7 --max-pause 20ms --name "8 users"   # an id of your own
""",
    ),
    "close": Action(
        "close one, and judge it",
        """\
Close a measured window and judge it: whether it is clean, or what speaks against that, and which pauses
fell into it. Its verdict stays from then on; closed again, it is told again.
""",
        """\
  gc-sidecar window close "$id"
  gc-sidecar window close --require-clean "$id" || echo "measure again"
""",
        ASKING_CODES.replace("  1  it failed", "  1  it is not clean (--require-clean), it failed"),
    ),
    "show": Action(
        "tell how one stands, or stood",
        """\
Show a measured window: of one that is open, the verdict that it would have if it were closed now.
""",
        """\
  gc-sidecar window show "$id"
  gc-sidecar window show sweep-7 --json | jq .window.verdict.reasons
""",
    ),
}

# A TIME is of the collections that are counted before it; the longest is of any generation. 80 columns hold it.
COLUMNS = ("ROLE", "DP", "RANK", "PID", "FULL", "TIME", "YOUNG", "TIME", "LONGEST", "GROWTH")
LIST_COLUMNS = ("ID", "STATE", "VERDICT", "NAME", "OPENED", "LENGTH")
SHOWN_PAUSES = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `window`."""
    describe(parser, DESCRIPTION, EXAMPLES, ACTIONS["close"].exit_codes)
    choices = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    parsers = {}
    for name, each in ACTIONS.items():
        parsers[name] = choices.add_parser(
            name, help=each.help, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        describe(parsers[name], each.description, each.examples, each.exit_codes)
    opening, closing, showing = parsers["open"], parsers["close"], parsers["show"]
    opening.add_argument("id", nargs="?", metavar="ID", help="an id of your own for it")
    add_option(opening, "--name", metavar="TEXT", environment=False, help="what it is of")
    add_option(
        opening, "--max-pause", duration_with_unit, metavar="DURATION",
        help="a longer pause is not clean (default 50ms)",
    )  # fmt: skip
    add_option(
        opening, "--max-growth-bytes", size_option, metavar="SIZE",
        help="a process that grew by more is not clean",
    )  # fmt: skip
    add_switch(closing, "--require-clean", "exit with 1 where it is not clean", environment=False)
    for action in (closing, showing):
        action.add_argument("id", metavar="ID", help="what `gc-sidecar window open` printed")
    for action in (opening, closing, showing):
        add_client_arguments(action)


def run(args: argparse.Namespace) -> int:
    """Ask the sidecar, print what it says, return the exit code."""

    def call(client: Client) -> Answer:
        if args.action == "open":
            fields = {
                "window_id": args.id,
                "name": args.name,
                "max_pause_ms": None if args.max_pause is None else 1000 * args.max_pause,
                "max_growth_bytes": args.max_growth_bytes,
            }
            return client.open_window(**fields)
        if args.action == "close":
            return client.close_window(args.id)
        return client.get_window(args.id)

    def judge(answer: Answer) -> int:
        is_clean = answer.body["window"]["verdict"]["clean"]
        return EXIT_OK if is_clean or not args.require_clean else EXIT_FAILED

    def show(document: dict[str, Any]) -> str:
        if args.action == "open":
            return word(document["window"]["id"])
        return show_window(document)

    verb = f"window {args.action}"
    return perform(verb, args, call, show, judge if args.action == "close" else lambda _: EXIT_OK)


def show_window(document: dict[str, Any]) -> str:
    """One window and its verdict for people."""
    window = document.get("window") or {}
    verdict = window.get("verdict") or {}
    name = f" ({word(window['name'])})" if window.get("name") else ""
    lines = [
        f"window {word(window.get('id'))}{name} is {word(window.get('state'))}:"
        f" {verdict_word(window)}, {seconds(window.get('duration_s'))}"
    ]
    lines += [
        f"  {word(reason.get('code'))}: {word(reason.get('detail'))}"
        for reason in verdict.get("reasons") or []
    ]
    limits = window.get("limits") or {}
    lines.append(
        f"limits  pause {seconds(_s(limits.get('max_pause_ms')))},"
        f" stall {seconds(_s(limits.get('max_stall_ms')))} and {_percent(limits.get('max_stall_share'))},"
        f" growth {size(limits.get('max_growth_bytes'))}"
    )
    lines += [
        f"stall   dp{word(stall.get('dp_rank'))} {seconds(stall.get('stall_s'))}"
        f" ({100 * (stall.get('share') or 0):.3f} %)"
        for stall in verdict.get("stalls") or []
    ]
    latency = verdict.get("latency") or {}
    if latency.get("says"):
        # What it says of GC is said of late tokens alone, so they come first.
        about = ""
        if latency.get("stalled_s") is not None:
            about = f"late by about {seconds(latency['stalled_s'])} in all"
            if latency.get("explained") is not None:
                about += f", of which GC explains {100 * latency['explained']:.0f} %"
            about += ": "
        lines.append(f"tokens  {about}{word(latency['says'])}")
    if verdict.get("lost_records"):
        lines.append(
            f"lost    of {count(verdict['lost_records'])} pauses no record came (counts and times"
            " have them all)"
        )
    if verdict.get("not_seen"):
        lines.append(f"unseen  {word(verdict['not_seen'])}")
    parts = ["\n".join(lines)]
    processes = rows_of(verdict)
    if processes:
        parts.append(table(COLUMNS, [_row(process) for process in processes]))
    pauses = sorted(
        verdict.get("pauses") or [], key=lambda each: each.get("duration_s") or 0, reverse=True
    )
    if pauses:
        parts.append(f"longest pauses\n{pause_table(pauses[:SHOWN_PAUSES])}")
    return "\n\n".join(parts)


def show_windows(document: dict[str, Any]) -> str:
    """One line for each window."""
    windows = document.get("windows") or []
    if not windows:
        return "no window has been opened: `gc-sidecar window open` (POST /gc/windows) opens one"
    rows = [
        [
            word(window.get("id")),
            word(window.get("state")),
            verdict_word(window),
            word(window.get("name")),
            word(window.get("opened_at")),
            seconds(window.get("duration_s")),
        ]
        for window in windows
    ]
    return table(LIST_COLUMNS, rows, left=5)


def verdict_word(window: dict[str, Any]) -> str:
    """clean or NOT clean; of an open window, so far, which the list of all does not tell."""
    clean = (window.get("verdict") or window).get("clean")
    if clean is None:
        return UNKNOWN if window.get("state") in (None, "closed") else "none yet"
    text = "clean" if clean else "NOT clean"
    return text if window.get("state") == "closed" else f"{text} so far"


def _s(milliseconds: Any) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _percent(share: Any) -> str:
    return UNKNOWN if share is None else f"{100 * share:g} %"


def _row(process: dict[str, Any]) -> list[str]:
    pauses = process.get("pauses") or {}
    generations = [pauses.get(name) or {} for name in ("gen0", "gen1", "gen2")]
    longest = [each["max_s"] for each in generations if each.get("count") and each.get("max_s")]
    return [
        role(process),
        word(process.get("dp_rank")),
        word(process.get("rank")),
        word(process.get("pid")),
        *_count_and_time(generations[2:]),
        *_count_and_time(generations[:2]),
        seconds(max(longest, default=None)),
        change(process.get("growth_bytes")),
    ]


def _count_and_time(generations: list[dict[str, Any]]) -> list[str]:
    counts = [each["count"] for each in generations if each.get("count") is not None]
    times = [each["total_s"] for each in generations if each.get("total_s") is not None]
    if len(counts) < len(generations) or len(times) < len(generations):
        return [UNKNOWN, UNKNOWN]
    return [count(sum(counts)), seconds(sum(times)) if sum(counts) else UNKNOWN]
