"""Flags that take their default from the environment, and the units that people write them in.

`--max-rss-growth-bytes 2GiB` and `GC_SIDECAR_MAX_RSS_GROWTH_BYTES=2GiB` mean the same; a flag wins.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gc_sidecar_agent.client import Client

PREFIX = "GC_SIDECAR_"
UNITS_NOTE = """\
units: durations are 90s, 15m, 1h30m, 500ms or plain seconds; sizes are 2GiB, 500M or plain bytes.
Flags are also read from the environment (--lease is GC_SIDECAR_LEASE), but those that are a
decision for one call are not (--force, --operation-id, --watch). A flag wins.
"""
# Of a verb that sends an operation those of `cli`; of `status`, and of whoever exits like it:
LOOKING_CODES = """\
exit codes:
  0  done, and every process of the engine has the policy
  1  it failed, or was refused; the reason is on standard error
  2  wrong usage, or input that the sidecar does not take
  3  no sidecar could be reached, or it did not answer
  4  incomplete: a process of the engine has not acknowledged the policy
  130  interrupted by Ctrl-C
"""
# Of a verb that asks the sidecar, and no process of the engine.
ASKING_CODES = """\
exit codes:
  0  done
  1  it failed, or was refused; the reason is on standard error
  2  wrong usage, or input that the sidecar does not take
  3  no sidecar could be reached, or it did not answer
  130  interrupted by Ctrl-C
"""

SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
BYTES: dict[str, int] = {
    "": 1,
    **{f"{prefix}i": 1 << 10 * power for power, prefix in enumerate("kmgt", start=1)},
    **{prefix: 10 ** (3 * power) for power, prefix in enumerate("kmgt", start=1)},
}
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


class UsageError(Exception):
    """Input that is wrong in a way that argparse cannot see; ends with exit code 2."""


class FromEnvironment(str):
    """A flag's default as its variable holds it; remembers the variable, for the error message."""

    variable: str


def duration(text: str) -> float:
    """The seconds in `text`: 90, 90s, 15m, 1h30m, 500ms."""
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return math.fsum(float(number) * SECONDS[unit] for number, unit in parts)
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a duration like 90s, 15m or 1h30m")


def duration_with_unit(text: str) -> float:
    """The same where a plain number could be taken for milliseconds: it is refused."""
    seconds = duration(text)
    if text[-1:].isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} has no unit: say {text}ms or {text}s")
    return seconds


def size(text: str) -> int:
    """The bytes in `text`, units as in Kubernetes: 2GiB or 2Gi is binary, 2GB or 2G decimal."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]i?|)b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 2GiB, 500M or 1048576")
    return round(float(match[1]) * BYTES[match[2]])


def address(text: str) -> str:
    """A sidecar's address, to which nobody has forgotten the scheme; the rest is the client's to judge."""
    if "://" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} has no http://: write http://{text}")
    return text


def boolean(text: str) -> bool:
    """What a variable of a switch holds."""
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither 1 nor 0")


def add_option(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    flag: str,
    convert: Callable[[str], Any] = str,
    *,
    environment: bool = True,
    **rest: Any,
) -> None:
    """Add a flag with a value. Its default is its variable's, unless `environment` is false."""
    default = _from_environment(flag) if environment else None
    parser.add_argument(flag, type=_naming_the_variable(convert), default=default, **rest)


def add_switch(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    flag: str,
    help: str,
    *,
    environment: bool = True,
) -> None:
    """Add a flag without a value; its variable holds 1 or 0."""
    default = _from_environment(flag) if environment else None
    convert = _naming_the_variable(boolean)
    parser.add_argument(
        flag, action=_Switch, type=convert, default=False if default is None else default, help=help
    )


def add_client_arguments(
    parser: argparse.ArgumentParser, json: str = "print the sidecar's JSON answer, untouched"
) -> None:
    """The flags of every client verb: where the sidecar is, and how to print; `json` says what --json does."""
    # Here and below: what has no client, doctor and the embedded engine, starts without HTTP's modules.
    from gc_sidecar_agent.client import DEFAULT_URL

    add_option(
        parser,
        "--url",
        address,
        metavar="URL",
        help=f"the sidecar's control listener (default {DEFAULT_URL})",
    )
    add_option(
        parser,
        "--token-file",
        metavar="FILE",
        help="a file with the bearer token, where the sidecar asks for one",
    )
    add_switch(parser, "--json", help=json)


def add_change_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of every verb that changes something."""
    add_option(
        parser,
        "--owner",
        metavar="NAME",
        help="who you are (default anonymous): a policy obeys its owner, and others with --force",
    )
    add_option(
        parser,
        "--deadline",
        duration,
        metavar="DURATION",
        help="how long the sidecar may take to answer (default 30s)",
    )
    add_switch(
        parser,
        "--allow-partial",
        help="accept what can be had where not every process does it (exit code 4)",
    )
    add_switch(parser, "--force", help="also against another owner's policy", environment=False)
    add_option(
        parser,
        "--operation-id",
        metavar="ID",
        environment=False,
        help="your own name for this operation; sent again, it is not done again",
    )


def describe(
    parser: argparse.ArgumentParser,
    description: str,
    examples: str,
    exit_codes: str = LOOKING_CODES,
) -> None:
    """What `--help` says before and after the flags."""
    parser.description = description
    parser.epilog = f"examples:\n{examples}\n{UNITS_NOTE}\n{exit_codes}"


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of every verb that enters a policy."""
    add_option(
        parser,
        "--lease",
        duration,
        metavar="DURATION",
        help="how long the policy lasts without renewal, counted from the request (default 1h)",
    )
    add_option(
        parser,
        "--max-rss-growth-bytes",
        size,
        metavar="SIZE",
        help="a process whose memory grows by more than this restores itself",
    )
    add_switch(parser, "--no-collect-first", help="do not collect before the first freeze")


def policy_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What these flags say, as fields of a request."""
    return {
        "lease_s": args.lease,
        "max_rss_growth_bytes": args.max_rss_growth_bytes,
        "collect_first": False if args.no_collect_first else None,
    }


def change_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of those flags; what nobody said is None."""
    return {
        "owner": args.owner,
        "deadline_s": args.deadline,
        "allow_partial": args.allow_partial or None,
        "force": args.force or None,
        "operation_id": args.operation_id,
    }


def make_client(args: argparse.Namespace) -> Client:
    """The client for `--url` and `--token-file`; raises UsageError."""
    from gc_sidecar_agent.client import client_from_environment

    try:
        return client_from_environment(args.url, args.token_file)
    except OSError as error:
        raise UsageError(f"--token-file {error.filename}: {error.strerror}") from None
    except ValueError as error:
        where = f"--token-file {args.token_file}: " if args.token_file else ""
        raise UsageError(f"{where}{error}") from None


class _Switch(argparse.Action):
    """Like store_true, but its default is converted like that of a flag with a value."""

    def __init__(self, option_strings: list[str], dest: str, **rest: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **rest)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, True)


def _from_environment(flag: str) -> FromEnvironment | None:
    variable = PREFIX + flag.lstrip("-").replace("-", "_").upper()
    value = os.environ.get(variable)
    if not value:
        return None
    default = FromEnvironment(value)
    default.variable = variable
    return default


def _naming_the_variable(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def converted(text: str) -> Any:
        try:
            return convert(str(text))
        except argparse.ArgumentTypeError as error:
            if isinstance(text, FromEnvironment):
                raise argparse.ArgumentTypeError(f"{text.variable}: {error}") from None
            raise

    return converted


def warn(message: str) -> None:
    """One line on standard error, in our name. Nothing is said where nobody can hear it."""
    if sys.stderr is None:
        return
    try:
        print(f"gc-sidecar: {message}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        # What is left in the buffer would fail again at the end, and change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
