"""`gc-sidecar maintain`: one full collection in every process, at a moment that nobody measures.

A thin layer over `POST /gc/maintain`; it waits for the operation where that outlasts its deadline.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gc_sidecar_agent.cli import EXIT_CODES
from gc_sidecar_agent.client import Answer, Client
from gc_sidecar_agent.command import MAXIMUM_DEADLINE_S, MINIMUM_DEADLINE_S
from gc_sidecar_agent.commands.options import (
    add_change_arguments,
    add_client_arguments,
    add_option,
    add_switch,
    change_fields,
    describe,
    duration,
)
from gc_sidecar_agent.commands.output import judge_change, perform, seconds, show_change

DEFAULT_WAIT_S = 600.0

DESCRIPTION = """\
Maintain: unfreeze, collect and freeze again, in every process of the engine side by side. It
reclaims the cyclic garbage that waits under `freeze` and reports, per process, the pause, the
objects collected and the change of memory. Under normal GC it is one measured full collection.

The engine takes no step meanwhile, so run it between two measurements, or with `--when idle`,
which waits until the engine has no request. Objects freed are not bytes returned: `--trim` hands
the allocator's free pages back to the system.
"""

EXAMPLES = """\
  gc-sidecar maintain                                # now
  gc-sidecar maintain --when idle --wait 5m          # as soon as nothing runs
  gc-sidecar maintain --trim                         # and give memory back
  gc-sidecar maintain --json | jq '.operation.processes[] | {role, rank, pause_s}'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `maintain`."""
    describe(parser, DESCRIPTION, EXAMPLES, EXIT_CODES)
    add_option(
        parser,
        "--when",
        choices=("now", "idle"),
        help="now, or when the engine has nothing to do (default now)",
    )
    add_switch(parser, "--trim", help="return free memory to the system afterwards (malloc_trim)")
    add_option(
        parser,
        "--wait",
        duration,
        metavar="DURATION",
        help="how long to wait for an idle moment, and for an operation that outlasts its"
        " deadline (default 10m)",
    )
    add_switch(parser, "--no-wait", help="return when the operation outlasts its deadline")
    add_change_arguments(parser)
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Send it, wait for it, print it, return the exit code."""
    wait_s = DEFAULT_WAIT_S if args.wait is None else args.wait

    def call(client: Client) -> Answer:
        fields = change_fields(args)
        if args.when == "idle" and args.deadline is None:
            # The sidecar waits for an idle moment until its deadline, and gives up there.
            fields["deadline_s"] = min(max(wait_s, MINIMUM_DEADLINE_S), MAXIMUM_DEADLINE_S)
            longest = seconds(fields["deadline_s"])
            print(f"waiting until the engine is idle, at most {longest}", file=sys.stderr)
        answer = client.maintain(when=args.when, trim=args.trim or None, **fields)
        if args.no_wait:
            return answer
        return client.wait_operation(answer, wait_s, _progress)

    return perform("maintain", args, call, show_change, judge_change)


def _progress(operation: dict[str, Any], waited_s: float) -> None:
    state = operation.get("state") or "running"
    reason = f", {operation['detail']}" if operation.get("detail") else ""
    print(f"maintain {state} ({waited_s:.0f} s{reason})", file=sys.stderr)
