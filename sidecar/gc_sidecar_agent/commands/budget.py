"""`gc-sidecar budget`: enter the policy `budget` in every process of the engine.

A thin layer over `PUT /gc/policy`; the flags are the route's fields.
"""

from __future__ import annotations

import argparse

from gc_sidecar_agent.cli import EXIT_CODES
from gc_sidecar_agent.client import Answer, Client
from gc_sidecar_agent.command import DEFAULT_BUDGET_MS, MINIMUM_BUDGET_MS
from gc_sidecar_agent.commands.options import (
    add_change_arguments,
    add_client_arguments,
    add_option,
    add_policy_arguments,
    change_fields,
    describe,
    duration_with_unit,
    policy_fields,
)
from gc_sidecar_agent.commands.output import judge_change, perform, show_policy_change

DESCRIPTION = """\
Bound garbage collection: every process of the engine collects once, and from then on no automatic
collection takes longer than the budget, whatever the heap's size. Unlike `freeze` it goes on
collecting what dies young, so memory follows what is alive. All processes or none: what was
changed is rolled back if one does not acknowledge.

The policy lasts for its lease (one hour unless you say otherwise) and then each process puts
itself back, whatever became of the sidecar or of you. The lease counts from the request, so a slow
first collection is part of it. Garbage in cycles that was alive when a part
of the heap was frozen waits for `gc-sidecar maintain`.
"""

EXAMPLES = """\
  gc-sidecar budget                                    # 5 ms, one hour, owner `anonymous`
  gc-sidecar budget --pause-budget 10ms --lease 12h    # fewer freezes, so less waits for maintain
  gc-sidecar budget --owner bench-1 --json | jq .operation.processes
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `budget`."""
    describe(parser, DESCRIPTION, EXAMPLES, EXIT_CODES)
    add_option(
        parser,
        "--pause-budget",
        duration_with_unit,
        metavar="DURATION",
        help="the longest automatic collection that you accept,"
        f" at least {MINIMUM_BUDGET_MS:g}ms (default {DEFAULT_BUDGET_MS:g}ms)",
    )
    add_policy_arguments(parser)
    add_change_arguments(parser)
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Send it, print it, return the exit code."""
    given_s = args.pause_budget
    budget_ms = DEFAULT_BUDGET_MS if given_s is None else given_s * 1000

    def call(client: Client) -> Answer:
        return client.budget(budget_ms, **policy_fields(args), **change_fields(args))

    return perform("budget", args, call, show_policy_change, judge_change)
