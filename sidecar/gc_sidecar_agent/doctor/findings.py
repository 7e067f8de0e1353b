"""The finding, and how findings are shown: what the two halves of `gc-sidecar doctor` share.

A finding has a stable id, one line of reason and, unless all is well, one line of remedy that says what to do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from gc_sidecar_agent.cli import EXIT_FAILED, EXIT_INCOMPLETE, EXIT_OK
from gc_sidecar_agent.commands.options import add_option, add_switch
from gc_sidecar_agent.commands.output import word

OK, WARNING, ERROR = "ok", "warning", "error"
EXITS = {OK: EXIT_OK, WARNING: EXIT_INCOMPLETE, ERROR: EXIT_FAILED}
# Worst first, as they are shown.
LEVELS = (ERROR, WARNING, OK)
# The levels that an exit code other than 0 may begin at.
FAIL_ON = (WARNING, ERROR)

EXIT_CODES = """\
exit codes:
  0  nothing is wrong
  1  an error: something will not work
  2  wrong usage
  4  warnings, and no error; 0 with --fail-on error
"""

DIM, RESET = "\x1b[2m", "\x1b[0m"

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Finding:
    """What one check found. `check` is stable; `remedy` is None where there is nothing to do."""

    check: str
    level: str
    reason: str
    remedy: str | None = None


def ok(check: str, reason: str) -> Finding:
    """All is well."""
    return Finding(check, OK, reason)


def warning(check: str, reason: str, remedy: str) -> Finding:
    """It works, but not as well, or not as safely, as it should."""
    return Finding(check, WARNING, reason, remedy)


def error(check: str, reason: str, remedy: str) -> Finding:
    """Something does not work."""
    return Finding(check, ERROR, reason, remedy)


def add_report_arguments(parser: Any) -> None:
    """How findings are told: the flags of both halves."""
    add_switch(parser, "--json", "print the findings as JSON")
    add_option(
        parser,
        "--fail-on",
        _level,
        metavar="LEVEL",
        help="warning (default): warnings have an exit code other than 0, too; error: errors alone have",
    )


def _level(text: str) -> str:
    if text not in FAIL_ON:
        raise argparse.ArgumentTypeError(f"{text!r} is neither {' nor '.join(FAIL_ON)}")
    return text


def examine(
    checks: Sequence[Callable[[Subject], Iterable[Finding]]], subject: Subject
) -> list[Finding]:
    """What all `checks` find. One that fails itself is a finding too, and keeps no other from its work."""
    findings: list[Finding] = []
    for check in checks:
        try:
            findings.extend(check(subject))
        except Exception as failure:
            what = f"{type(failure).__name__}: {failure}"
            name = getattr(check, "__name__", str(check)).removeprefix("check_")
            findings.append(
                warning(name, f"this check itself failed: {what}", "report it: doctor has a fault")
            )
    return list(dict.fromkeys(findings))


def worst(findings: Iterable[Finding]) -> str:
    """The worst level that occurs."""
    levels = {finding.level for finding in findings}
    return next((level for level in LEVELS if level in levels), OK)


def report(findings: Sequence[Finding], as_json: bool, fail_on: str | None) -> int:
    """Print the findings, the worst first, and return the exit code."""
    ordered = sorted(findings, key=lambda finding: LEVELS.index(finding.level))
    if as_json:
        document = {
            "findings": [asdict(finding) for finding in ordered],
            "worst": worst(findings),
        }
        print(json.dumps(document, indent=2))
    else:
        print(show(ordered, colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
    return EXIT_OK if (worst(findings), fail_on) == (WARNING, ERROR) else EXITS[worst(findings)]


def show(findings: Sequence[Finding], colour: bool = False) -> str:
    """The findings for people: those that ask for something first, the others short and, on a terminal, dim."""
    level_width = max(len(level) for level in LEVELS)
    check_width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        level = finding.level.ljust(level_width)
        line = f"{level}  {finding.check.ljust(check_width)}  {word(finding.reason)}"
        lines.append(f"{DIM}{line}{RESET}" if colour and finding.level == OK else line)
        if finding.remedy:
            lines.append(f"{' ' * (level_width + 2)}what to do: {word(finding.remedy)}")
    levels = [finding.level for finding in findings]
    parts = [
        f"{levels.count(level)} {level}{'s' if level != OK and levels.count(level) != 1 else ''}"
        for level in LEVELS
        if level in levels
    ]
    return "\n".join([*lines, "", ", ".join(parts) or "nothing was checked"])


def ourselves() -> str:
    """The user that doctor runs as."""
    return f"user {os.geteuid()}"


def some(things: Sequence[object], most: int = 4) -> str:
    """The first of a list that may be long, for a finding's line."""
    more = len(things) - most
    return ", ".join(map(str, things[:most])) + (f" and {more} more" if more > 0 else "")
