"""`gc-sidecar windows`: one line for each measured window that the sidecar remembers.

A thin layer over `GET /gc/windows`; `gc-sidecar window` opens, closes and shows one.
"""

from __future__ import annotations

import argparse

from gc_sidecar_agent.cli import EXIT_OK
from gc_sidecar_agent.commands.options import ASKING_CODES, add_client_arguments, describe
from gc_sidecar_agent.commands.output import perform
from gc_sidecar_agent.commands.window import show_windows

DESCRIPTION = """\
List the measured windows, newest first: whether each is open or closed, its verdict, when it was
opened, and how long it is. They are kept by the sidecar, the last 256, and end with it.
`gc-sidecar window open` opens one; `gc-sidecar window show ID` tells how an open one stands so far.
"""

EXAMPLES = """\
  gc-sidecar windows
  gc-sidecar windows --json | jq -r '.windows[] | select(.clean == false) | .id'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `windows`."""
    describe(parser, DESCRIPTION, EXAMPLES, ASKING_CODES)
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Ask, print, return the exit code."""
    return perform(
        "windows",
        args,
        lambda client: client.request("GET", "/gc/windows"),
        show_windows,
        lambda _: EXIT_OK,
    )
