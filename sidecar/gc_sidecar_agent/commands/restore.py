"""`gc-sidecar restore`: end the policy and put every process back exactly as it was found.

A thin layer over `POST /gc/restore`, safe at any time and any number of times.
"""

from __future__ import annotations

import argparse

from gc_sidecar_agent.cli import EXIT_CODES
from gc_sidecar_agent.client import Answer, Client
from gc_sidecar_agent.commands.options import (
    add_change_arguments,
    add_client_arguments,
    change_fields,
    describe,
)
from gc_sidecar_agent.commands.output import judge_change, perform, show_change

DESCRIPTION = """\
Restore: end the policy in every process. Thresholds, the enabled flag and the frozen state of the
heap become what they were before, and what waited as garbage is collected. Safe to call at any
time, twice, and after a crash; where nothing is in force each process stays as it is, and only the
generation rises.
"""

EXAMPLES = """\
  gc-sidecar restore
  gc-sidecar restore --owner bench-1                 # the policy that bench-1 entered
  gc-sidecar restore --force                         # whoever entered it
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `restore`."""
    describe(parser, DESCRIPTION, EXAMPLES, EXIT_CODES)
    add_change_arguments(parser)
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Send it, print it, return the exit code."""

    def call(client: Client) -> Answer:
        return client.restore(**change_fields(args))

    return perform("restore", args, call, show_change, judge_change)
