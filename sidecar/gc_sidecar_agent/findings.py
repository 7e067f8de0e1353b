"""What the two halves of `gc-sidecar doctor` share: the finding, how findings are shown, and the checks of the
run directory, which lies between them.

A finding has a stable id, one line of reason and, unless all is well, one line of remedy that says what to do.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from gc_sidecar_agent.cli import EXIT_FAILED, EXIT_INCOMPLETE, EXIT_OK
from gc_sidecar_agent.commands.output import count, size, word
from gc_sidecar_agent.page import PAGE_BYTES

OK, WARNING, ERROR = "ok", "warning", "error"
EXITS = {OK: EXIT_OK, WARNING: EXIT_INCOMPLETE, ERROR: EXIT_FAILED}
# Worst first, as they are shown.
LEVELS = (ERROR, WARNING, OK)

EXIT_CODES = """\
exit codes:
  0  nothing is wrong
  1  an error: something will not work
  2  wrong usage
  4  warnings, and no error
"""

# File systems that are memory: a page is written ten times a second.
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
PROBE_NAME = re.compile(r"\.doctor\.\d+\.[0-9a-f]+\.tmp")
DIM, RESET = "\x1b[2m", "\x1b[0m"
INDENT = 4

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


def report(findings: Sequence[Finding], as_json: bool) -> int:
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
    return EXITS[worst(findings)]


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


# --- the run directory ---


def examine_run_directory(path: str, pages: int) -> list[Finding]:
    """Whether pages can live in `path`, as this user. `pages` is how many are to be expected there."""
    try:
        status = os.stat(path)
        names = os.listdir(path)
    except FileNotFoundError:
        return [
            error(
                "run_dir",
                f"the run directory {path} does not exist here",
                f"mount the shared volume there, or create it: install -d -m 2770 {path}",
            )
        ]
    except NotADirectoryError:
        return [
            error(
                "run_dir", f"{path} is not a directory", "let GC_SIDECAR_RUN_DIR name a directory"
            )
        ]
    except OSError as failure:
        return [
            error(
                "run_dir",
                f"{ourselves()} cannot read the run directory {path}: {failure.strerror}",
                "give the pod an fsGroup that both containers have, and the directory mode 2770",
            )
        ]
    missing = max(1, pages - sum(name.endswith(".page") for name in names))
    return [
        ok("run_dir", f"the run directory is {path}"),
        *_try_a_page(path, status),
        _room(path, missing),
        _medium(path),
        _mode(path, status),
    ]


def _try_a_page(path: str, status: os.stat_result) -> list[Finding]:
    """Do what an agent does for its page, on a file that goes again."""
    name = os.path.join(path, f".doctor.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600)
    except OSError as failure:
        if failure.errno in (errno.ENOSPC, errno.EDQUOT):
            return []  # told by the check for room
        if failure.errno == errno.EROFS:
            remedy = "mount it without readOnly into both containers"
        else:
            remedy = (
                "give the pod an fsGroup that both containers have, and the directory mode 2770"
            )
        return [
            error(
                "run_dir_writable",
                f"{ourselves()} cannot write in {path} ({_described(status)}): {failure.strerror}",
                remedy,
            )
        ]
    findings = [ok("run_dir_writable", f"{ourselves()} can write in it")]
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            findings.append(ok("run_dir_locks", "record locks work there"))
        except OSError as failure:
            findings.append(
                warning(
                    "run_dir_locks",
                    f"no record locks there ({failure.strerror}): an ended process is told only by its"
                    " heartbeat, 5 s late",
                    "use a memory volume: emptyDir with medium: Memory",
                )
            )
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            mmap.mmap(fd, mmap.PAGESIZE).close()
            findings.append(ok("run_dir_map", "files there can be mapped"))
        except (OSError, ValueError) as failure:
            if getattr(failure, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
                findings.append(
                    error(
                        "run_dir_map",
                        f"a file there cannot be mapped ({failure}), so no agent gets a page",
                        "use a memory volume: emptyDir with medium: Memory",
                    )
                )
    finally:
        os.unlink(name)
        os.close(fd)
    return findings


def _room(path: str, missing: int) -> Finding:
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    files = status.f_favail if status.f_files else missing
    fit = min(free // PAGE_BYTES, files)
    if fit >= missing:
        return ok("run_dir_room", f"room for {count(fit)} more pages")
    return error(
        "run_dir_room",
        f"{size(free)} and {count(files)} files are left, which is room for {fit} more pages of"
        f" {size(PAGE_BYTES)}; {missing} may come, and a process without room gets none",
        "raise the volume's sizeLimit, or remove what does not belong there",
    )


def _medium(path: str) -> Finding:
    kind = file_system_of(path)
    if kind is None:
        return ok("run_dir_memory", "what kind of file system it is cannot be told here")
    if kind in MEMORY_FILE_SYSTEMS:
        return ok("run_dir_memory", f"it is memory ({kind})")
    return warning(
        "run_dir_memory",
        f"{path} is on {kind}, not in memory: every process writes there ten times a second, and a slow"
        " disk makes sight stale",
        "use a memory volume: emptyDir with medium: Memory (or a directory in /dev/shm)",
    )


def _mode(path: str, status: os.stat_result) -> Finding:
    """Two users meet here: what one writes for the group, the other has to be able to read."""
    mode = stat.S_IMODE(status.st_mode)
    described = _described(status)
    user = os.geteuid()
    if not mode & stat.S_ISGID:
        if status.st_uid == user and not mode & 0o022:
            return ok("run_dir_mode", f"it is this user's own ({described})")
        return warning(
            "run_dir_mode",
            f"{path} is not setgid ({described}): the secret that the sidecar leaves there can be read by"
            " the engine only if both run as the same user",
            f"give the pod an fsGroup, or: chgrp GROUP {path} && chmod 2770 {path}",
        )
    if user != 0 and status.st_gid not in {os.getegid(), *os.getgroups()}:
        return warning(
            "run_dir_mode",
            f"{ourselves()} is not in the group of {path} ({described}), and cannot read what is for it",
            f"give this container the pod's fsGroup, or a group: supplementalGroups: [{status.st_gid}]",
        )
    return ok("run_dir_mode", f"setgid, so that both users' files have its group ({described})")


def _described(status: os.stat_result) -> str:
    mode = stat.S_IMODE(status.st_mode)
    return f"mode {mode:04o}, user {status.st_uid}, group {status.st_gid}"


def ourselves() -> str:
    """The user that doctor runs as."""
    return f"user {os.geteuid()}"


def file_system_of(path: str, mounts: str = "/proc/self/mountinfo") -> str | None:
    """The type of the file system that `path` is on; None where the kernel does not tell."""
    path = os.path.realpath(path)
    best, kind = "", None
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                before, _, after = line.partition(" - ")
                point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), before.split()[4])
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                # Of two that are mounted on one point, the later one lies on top.
                if inside and len(point) >= len(best):
                    best, kind = point, after.split()[0]
    except (OSError, IndexError):
        return None
    return kind
