"""`gc-sidecar sweep`: the same points of load under each GC policy, and which outliers were GC.

What it does is in the package `gc_sidecar.sweep`; here are its flags, its progress, and its way out.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import platform
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from gc_sidecar import __version__
from gc_sidecar.sweep import page, reporting
from gc_sidecar.sweep.analysis import PolicyResult, judge
from gc_sidecar.sweep.driver import DriveError, Driver
from gc_sidecar.sweep.files import replacing
from gc_sidecar.sweep.journal import Journal
from gc_sidecar.sweep.plan import POLICIES, Plan, PlanError, check_policies, grid, read_points
from gc_sidecar.sweep.session import LEASE_S, Session
from gc_sidecar_agent.cli import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
)
from gc_sidecar_agent.client import ClientError, Unreachable
from gc_sidecar_agent.command import DEFAULT_BUDGET_MS, MAXIMUM_BUDGET_MS, MINIMUM_BUDGET_MS
from gc_sidecar_agent.commands.options import (
    ASKING_CODES,
    UsageError,
    add_client_arguments,
    add_option,
    add_switch,
    describe,
    duration_with_unit,
    make_client,
    warn,
)
from gc_sidecar_agent.commands.output import INPUT_STATUSES
from gc_sidecar_agent.supervise import ENDING

DESCRIPTION = """\
Send the same requests under each GC policy in turn, and say of every outlier whether GC was it. Each
point (prompt length, output length, concurrency) runs equally often under each policy, in blocks that
alternate, so that what drifts on the machine hits all alike. A sidecar must run beside the engine.

A sweep that was stopped or killed goes on where it stopped when you repeat the command; meanwhile the
engine is in normal GC. A block in which something else happened (a process restarted, somebody asked
for a collection) is left out, and run again in the same way; until then the exit code is 1. The report
is written anew after every block: report.html, report.json, measurements.csv.
"""

EXAMPLES = """\
  gc-sidecar sweep --out sweep-1                                    # 9 points, 3 rounds, all policies
  gc-sidecar sweep --out s2 --prompt-tokens 128,1024 --output-tokens 64 --concurrency 1,8 --requests 40
  gc-sidecar sweep --out s3 --points points.csv --policies off,budget --pause-budget 10ms
  gc-sidecar sweep --out s1 --json | jq '.policies[] | {policy, gc_outliers, longest_s}'
"""
EXIT_CODES = ASKING_CODES.replace("  1  it failed", "  1  blocks were left out, it failed")
REPORT, PAGE, CSV = "report.json", "report.html", "measurements.csv"
ENDED = f"its policy is ended, or ends by its lease within {LEASE_S:g} s"
FIXES = f"{ENDED}; repeat the command to go on after the last whole block"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `sweep`."""
    describe(parser, DESCRIPTION, EXAMPLES, EXIT_CODES)
    option = add_option
    option(
        parser,
        "--out",
        Path,
        metavar="DIR",
        help="where the report and the journal are written",
        required=True,
    )
    option(
        parser, "--engine-url", str, metavar="URL",
        help="the engine's own address (default http://localhost:8000)",
    )  # fmt: skip
    option(
        parser,
        "--model",
        str,
        metavar="NAME",
        help="the model (default: the first that the engine lists)",
    )
    option(
        parser, "--points", Path, metavar="FILE", environment=False,
        help="points as CSV or JSON with prompt_tokens, output_tokens, concurrency; instead of the three below",
    )  # fmt: skip
    option(
        parser,
        "--prompt-tokens",
        _numbers,
        metavar="N,...",
        help="prompt lengths (default 16,64,128)",
    )
    option(parser, "--output-tokens", _numbers, metavar="N,...", help="output lengths (default 64)")
    option(
        parser,
        "--concurrency",
        _numbers,
        metavar="N,...",
        help="requests side by side (default 1,2,4)",
    )
    option(
        parser,
        "--requests",
        _positive,
        metavar="N",
        help="requests at each point of a block (default 20)",
    )
    option(
        parser,
        "--warm-up",
        _count,
        metavar="N",
        help="requests before them that count for nothing (default 2, and one on each connection)",
    )
    option(parser, "--rounds", _positive, metavar="N", help="blocks of each policy (default 3)")
    option(
        parser, "--policies", str, metavar="P,...",
        help=f"which policies (default {','.join(POLICIES)})",
    )  # fmt: skip
    option(
        parser, "--pause-budget", duration_with_unit, metavar="DURATION",
        help=f"of budget (default {DEFAULT_BUDGET_MS:g}ms)",
    )  # fmt: skip
    option(
        parser,
        "--owner",
        str,
        metavar="NAME",
        help="whose policies they are (default: a name of its own)",
    )
    option(
        parser,
        "--seed",
        int,
        metavar="N",
        help="of the random prompts, of which each block has its own (default: new ones each time)",
    )
    add_switch(
        parser, "--fresh", help="throw away what is in DIR and begin anew", environment=False
    )
    add_client_arguments(parser, json=f"print what is in {REPORT} instead of the table")


def run(args: argparse.Namespace) -> int:
    """Run it, print the table, return the exit code."""
    try:
        plan = make_plan(args)
        client = make_client(args)
        driver = Driver(args.engine_url or "http://localhost:8000", args.model, args.seed)
        about = _about(driver.url, args.seed, plan)
        journal = Journal(args.out, plan, about, args.fresh, (PAGE, REPORT, CSV))
    except (PlanError, UsageError, OSError) as error:
        warn(str(error))
        return EXIT_USAGE
    tell = _progress(plan, journal)
    # What is here now stays: our own collections need not walk it.
    gc.collect()
    gc.freeze()
    session = Session(client, driver, plan, args.owner or _owner(plan, args.out), tell)
    catch_signals()
    try:
        missing = journal.missing(plan)
        journal.begin(asyncio.run(driver.find_model()) if missing else args.model)
        for block in missing:
            journal.add(session.run_block(block))
            _write_report(journal, args.out)
        results = _write_report(journal, args.out)
    except KeyboardInterrupt:
        tell("")
        warn(f"interrupted; {FIXES}")
        return EXIT_INTERRUPTED
    except PlanError as error:
        warn(str(error))
        return EXIT_USAGE
    except (ClientError, DriveError, OSError) as error:
        tell("")
        return _report_failure(error)
    if args.json:
        print(json.dumps(reporting.document(results, journal.about)))
    else:
        tell("")
        print(reporting.show(results))
        print(f"\n{args.out / PAGE}\n{args.out / REPORT}\n{args.out / CSV}")
    if any(result.disturbed for result in results):
        warn(
            "some blocks are left out, for something else happened in them; repeat the command to run them again"
        )
        return EXIT_FAILED
    return EXIT_OK


def _report_failure(error: Exception) -> int:
    """Say what went wrong and what helps against it; returns the exit code."""
    # What the sidecar does not take it will not take a second time.
    is_refused = isinstance(error, ClientError) and error.status in INPUT_STATUSES
    remedy = getattr(error, "remedy", None) or (ENDED if is_refused else FIXES)
    warn(f"{error}; {remedy}")
    if is_refused:
        return EXIT_USAGE
    return EXIT_UNREACHABLE if isinstance(error, Unreachable) else EXIT_FAILED


def catch_signals() -> None:
    """Whatever would end us interrupts us, so that the engine is restored first. nohup's SIGHUP stays ignored."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def make_plan(args: argparse.Namespace) -> Plan:
    """The plan that the flags describe. Raises PlanError, OSError; also for what a sidecar would refuse only when
    the block comes that needs it."""
    lengths = (args.prompt_tokens, args.output_tokens, args.concurrency)
    if args.points is not None:
        if any(each is not None for each in lengths):
            raise PlanError("--points already says lengths and concurrency")
        points = read_points(args.points)
    else:
        prompts, outputs, widths = (
            given or default
            for given, default in zip(lengths, ((16, 64, 128), (64,), (1, 2, 4)), strict=True)
        )
        points = grid(prompts, outputs, widths)
    policies = check_policies(POLICIES if args.policies is None else args.policies.split(","))
    _check_owner(args.owner)
    return Plan(
        points=points,
        policies=policies,
        rounds=args.rounds or 3,
        requests=args.requests or 20,
        warm_up=2 if args.warm_up is None else args.warm_up,
        pause_budget_ms=_budget_ms(args.pause_budget) if "budget" in policies else None,
    )


def _budget_ms(given_s: float | None) -> float:
    if given_s is None:
        return DEFAULT_BUDGET_MS
    budget_ms = 1000 * given_s
    if not MINIMUM_BUDGET_MS <= budget_ms <= MAXIMUM_BUDGET_MS:
        raise PlanError(
            f"--pause-budget is {budget_ms:g}ms, and must be from {MINIMUM_BUDGET_MS:g}ms to"
            f" {MAXIMUM_BUDGET_MS:g}ms"
        )
    return budget_ms


def _check_owner(owner: str | None) -> None:
    if owner is None:
        return
    # Here, for it starts the sidecar's whole web framework.
    from pydantic import TypeAdapter, ValidationError

    from gc_sidecar.server.requests import Owner

    try:
        TypeAdapter(Owner).validate_python(owner)
    except ValidationError as error:
        detail = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise PlanError(f"--owner {owner[:40]!r}: {detail}") from None


def _owner(plan: Plan, out: Path) -> str:
    """The same for a sweep that goes on, and another for any other."""
    return (
        f"sweep-{hashlib.sha256(f'{plan.fingerprint} {out.resolve()}'.encode()).hexdigest()[:12]}"
    )


def _about(engine_url: str, seed: int | None, plan: Plan) -> dict[str, Any]:
    return {
        "gc_sidecar": __version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "engine_url": engine_url,
        "seed": seed,
        "begun_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "plan": asdict(plan),
    }


def _write_report(journal: Journal, directory: Path) -> list[PolicyResult]:
    results = judge(journal.records)
    report = reporting.document(results, journal.about)
    for name, text in (
        (REPORT, json.dumps(report, indent=1) + "\n"),
        (PAGE, page.write(results, journal.about)),
    ):
        with replacing(directory / name) as out:
            out.write(text)
    reporting.write_csv(results, directory / CSV)
    return results


def _progress(plan: Plan, journal: Journal) -> Callable[[str], None]:
    total = len(plan.blocks())
    begun = total - len(journal.missing(plan))
    if begun:
        warn(f"goes on with {journal.path}: {begun} of {total} blocks are done")

    def tell(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif line:
            print(line, file=sys.stderr, flush=True)

    return tell


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _positive(text: str) -> int:
    number = _count(text)
    if not number:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)
