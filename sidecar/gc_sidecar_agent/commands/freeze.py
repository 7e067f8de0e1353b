"""`gc-sidecar freeze`: enter the policy `freeze` in every process of the engine.

A thin layer over `POST /gc/freeze`; the flags are the route's fields.
"""

from __future__ import annotations

import argparse

from gc_sidecar_agent.cli import EXIT_CODES
from gc_sidecar_agent.client import Answer, Client
from gc_sidecar_agent.commands.options import (
    add_change_arguments,
    add_client_arguments,
    add_option,
    add_policy_arguments,
    change_fields,
    describe,
    duration,
    policy_fields,
)
from gc_sidecar_agent.commands.output import judge_change, perform, show_policy_change

DESCRIPTION = """\
Freeze garbage collection: every process of the engine collects once, moves its heap out of the
collector's sight, and from then on runs no automatic full collection. All processes or none: what
was changed is rolled back if one does not acknowledge.

The policy lasts for its lease (one hour unless you say otherwise) and then each process puts
itself back, whatever became of the sidecar or of you. The lease counts from the request, so a slow
first collection is part of it. Freeze again as the same owner to renew.
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
    describe(parser, DESCRIPTION, EXAMPLES, EXIT_CODES)
    add_option(
        parser,
        "--interval",
        duration,
        metavar="DURATION",
        help="freeze again this often, at least 1s (default 60s)",
    )
    add_policy_arguments(parser)
    add_change_arguments(parser)
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Send it, print it, return the exit code."""

    def call(client: Client) -> Answer:
        return client.freeze(interval_s=args.interval, **policy_fields(args), **change_fields(args))

    return perform("freeze", args, call, show_policy_change, judge_change)
