"""The command line of the thin client, and the frame that the whole `gc-sidecar` command hangs in.

A verb is a row in a table and a module with `add_arguments(parser)` and `run(args) -> int`; only
the module of the verb that was asked for is imported, so `gc-sidecar status` starts at once.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gc_sidecar_agent import __version__

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INCOMPLETE = 4
EXIT_INTERRUPTED = 130

EXIT_CODES = """\
exit codes:
  0  done, and every process of the engine acknowledged it
  1  the operation failed or was refused; the reason is on standard error
  2  wrong usage, or input that the sidecar does not take
  3  no sidecar could be reached, or it did not answer
  4  incomplete: a process has not acknowledged, or an operation still runs
  130  interrupted by Ctrl-C; an operation that was sent goes on
"""

INTRODUCTION = """\
Python GC control for vLLM: freeze garbage collection in every process of an engine, prove it,
measure every pause, and bring the engine back to normal.
"""


@dataclass(frozen=True)
class Verb:
    """One verb: the module that does it, and the line that `--help` shows."""

    module: str
    help: str


VERBS = {
    "run": Verb("gc_sidecar_agent.commands.run", "run a benchmark under a policy, with a verdict"),
    "status": Verb("gc_sidecar_agent.commands.status", "show policy, coverage and every process"),
    "freeze": Verb("gc_sidecar_agent.commands.freeze", "no automatic full collection from now on"),
    "budget": Verb("gc_sidecar_agent.commands.budget", "no automatic collection over a budget"),
    "maintain": Verb("gc_sidecar_agent.commands.maintain", "collect once now, or when idle"),
    "window": Verb("gc_sidecar_agent.commands.window", "open and close a measured window"),
    "windows": Verb("gc_sidecar_agent.commands.windows", "list the measured windows"),
    "pauses": Verb("gc_sidecar_agent.commands.pauses", "print each pause, and follow new ones"),
    "restore": Verb("gc_sidecar_agent.commands.restore", "put every process back as it was found"),
    "doctor": Verb("gc_sidecar_agent.commands.doctor", "find what keeps the agent out of vLLM"),
}

# What needs more than Python alone: it comes with the whole package.
PACKAGE_VERBS = ("serve", "top", "export", "install-agent", "sweep", "demo")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb of the thin client and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = next((argument for argument in arguments if not argument.startswith("-")), None)
    if verb in PACKAGE_VERBS:
        where = f"`gc-sidecar {verb}` comes with the sidecar's package or image"
        print(f"gc-sidecar: {where}; here are: {', '.join(VERBS)}", file=sys.stderr)
        return EXIT_USAGE
    return dispatch(VERBS, arguments, version=__version__)


def dispatch(verbs: Mapping[str, Verb], argv: Sequence[str] | None, version: str) -> int:
    """Run the verb in `argv` (default: the process's own arguments) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(verbs, chosen=next((a for a in arguments if a in verbs), None))
    parser.add_argument("--version", action="version", version=f"gc-sidecar {version}")
    try:
        args, unknown = parser.parse_known_args(arguments)
        if unknown:
            # By the verb's own parser, for a verb may have its own exit code for that.
            getattr(args, "parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    except SystemExit as stop:  # argparse ends --help, --version and errors like this
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    if args.verb is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    if sys.stdout is None:  # closed (`>&-`): nobody wants to hear, and no verb has to mind
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Who read our output has seen enough (`| head`).
        _write_no_more()
        return EXIT_OK
    except OSError as error:
        if error.errno not in _OUTPUT_FAULTS or error.filename is not None:
            raise
        _write_no_more()
        print(f"gc-sidecar: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED


# How a write to a full disk or to a terminal that is gone fails.
_OUTPUT_FAULTS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)


def _write_no_more() -> None:
    """Flushing what is left at exit would complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser(verbs: Mapping[str, Verb], chosen: str | None) -> argparse.ArgumentParser:
    """The parser with all `verbs`, of which only the `chosen` one has its arguments."""
    parser = argparse.ArgumentParser(
        prog="gc-sidecar",
        description=INTRODUCTION,
        epilog=f"`gc-sidecar VERB --help` teaches a verb, with examples.\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choices = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for name, verb in verbs.items():
        verb_parser = choices.add_parser(
            name, help=verb.help, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == chosen:
            module = importlib.import_module(verb.module)
            module.add_arguments(verb_parser)
            verb_parser.set_defaults(run=module.run, parser=verb_parser)
    return parser
