"""`gc-sidecar freeze`: enter the policy `freeze` in every process of the engine.

A thin layer over `POST /gc/freeze`; the flags are the route's fields.
"""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from gc_sidecar_agent.client import Answer, Client
from gc_sidecar_agent.commands.options import (
    add_change_arguments,
    add_client_arguments,
    add_option,
    add_switch,
    change_fields,
    describe,
    duration,
    size,
)
from gc_sidecar_agent.commands.output import judge_change, perform, show_change, word

DESCRIPTION = """\
Freeze garbage collection: every process of the engine collects once, moves its heap out of the
collector's sight, and from then on runs no automatic full collection. All processes or none: what
was changed is rolled back if one does not acknowledge.

The policy lasts for its lease (one hour unless you say otherwise) and then each process puts
itself back, whatever became of the sidecar or of you. Freeze again as the same owner to renew.
Cyclic garbage waits for `gc-sidecar maintain`, so run that between two measurements.
"""

EXAMPLES = """\
  gc-sidecar freeze                                  # one hour, owner `anonymous`
  gc-sidecar freeze --owner bench-1 --lease 4h       # others cannot end it without --force
  gc-sidecar freeze --max-rss-growth-bytes 4GiB      # a process that grows more restores itself
  gc-sidecar freeze --no-collect-first               # enter at once, freeze garbage too
  gc-sidecar freeze --json | jq .operation.processes
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `freeze`."""
    describe(parser, DESCRIPTION, EXAMPLES)
    add_option(
        parser,
        "--interval",
        duration,
        metavar="DURATION",
        help="freeze again this often, at least 1s (default 60s)",
    )
    add_option(
        parser,
        "--lease",
        duration,
        metavar="DURATION",
        help="how long the policy lasts without renewal (default 1h)",
    )
    add_option(
        parser,
        "--max-rss-growth-bytes",
        size,
        metavar="SIZE",
        help="a process whose memory grows by more than this restores itself",
    )
    add_switch(parser, "--no-collect-first", help="do not collect before the first freeze")
    add_change_arguments(parser)
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Send it, print it, return the exit code."""

    def call(client: Client) -> Answer:
        return client.freeze(
            interval_s=args.interval,
            lease_s=args.lease,
            max_rss_growth_bytes=args.max_rss_growth_bytes,
            collect_first=False if args.no_collect_first else None,
            **change_fields(args),
        )

    return perform("freeze", args, call, _show, judge_change)


def _show(document: dict[str, Any]) -> str:
    lines = [show_change(document), ""]
    lease = document.get("lease")
    if isinstance(lease, dict):
        ends = word(lease.get("expires_at"))
        lines.append(f"the lease ends at {ends}: freeze again as the same owner to renew it")
    operation = document.get("operation")
    owner = operation.get("owner") if isinstance(operation, dict) else None
    named = f" --owner {shlex.quote(word(owner))}" if owner not in (None, "anonymous") else ""
    lines.append(f"back to normal with: gc-sidecar restore{named}")
    return "\n".join(lines)
