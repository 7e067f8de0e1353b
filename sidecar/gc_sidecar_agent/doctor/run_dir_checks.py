"""Checks of the run directory: whether the engine has one, the secret in it, and whether pages can live there.

It lies between the two halves of doctor: `examine_run_directory` is for both, the checks that take a `Site` are
the engine's. What the pages in it say is in `page_checks`.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Iterator

from gc_sidecar_agent.commands.output import count, size
from gc_sidecar_agent.doctor.findings import Finding, error, ok, ourselves, warning
from gc_sidecar_agent.doctor.site import ENDPOINT, PLUGIN, RUN_DIR_VARIABLE, Site
from gc_sidecar_agent.page import PAGE_BYTES

# Spelled out again, as RUN_DIR_VARIABLE is: `endpoint` cannot be imported before CPython 3.10 either.
TOKEN_NAME = "endpoint.token"
TOKEN_FILE_VARIABLE = "GC_SIDECAR_ENDPOINT_TOKEN_FILE"

PAGES_UNKNOWN = 16
# File systems that are memory: a page is written ten times a second.
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
PROBE_NAME = re.compile(r"\.doctor\.\d+\.[0-9a-f]+\.tmp")


# --- the engine's half ---


def check_run_dir(site: Site) -> Iterator[Finding]:
    path = site.environment.get(RUN_DIR_VARIABLE)
    own = site.own_environment.get(RUN_DIR_VARIABLE)
    if not path and site.embedded:
        yield ok(
            "run_dir", f"which one the embedded engine has is not known: set {RUN_DIR_VARIABLE}"
        )
        return
    if not path:
        yield warning(
            "run_dir",
            f"{RUN_DIR_VARIABLE} is not set for {site.who}: no pages and no board, so the sidecar is blind and"
            " reaches it by RPC alone",
            f"set {RUN_DIR_VARIABLE} to the directory that the engine and the sidecar share",
        )
        return
    if site.sees_engine and own and os.path.realpath(own) != os.path.realpath(path):
        yield warning(
            "run_dir_differs",
            f"the engine's {RUN_DIR_VARIABLE} is {path}, this container's {own}",
            f"set it once, in the pod's environment, and start the engine without another: {own}",
        )
    if not os.path.isabs(path):
        yield error(
            "run_dir",
            f"{RUN_DIR_VARIABLE}={path} is not an absolute path: it depends on where a process starts",
            f"name it in full: {RUN_DIR_VARIABLE}=/run/gc-sidecar",
        )
        return
    yield from examine_run_directory(path, _expected_pages(site))


def _expected_pages(site: Site) -> int:
    """How many processes the engine has, by its pages or by its command line."""
    for page in site.pages:
        topology = page.description.get("topology")
        if isinstance(topology, dict):
            ranks, workers = topology.get("dp_ranks"), topology.get("workers")
            if isinstance(ranks, list) and isinstance(workers, int):
                return len(ranks) * (1 + min(workers, 4096)) + (topology.get("api_servers") or 1)
    if site.engine is None:
        return PAGES_UNKNOWN

    def number(*flags: str) -> int:
        values = (site.engine.flag(flag) if site.engine else None for flag in flags)
        return next((int(value) for value in values if value and value.isdecimal()), 1)

    tensor = number("--tensor-parallel-size", "-tp")
    pipeline = number("--pipeline-parallel-size", "-pp")
    data = number("--data-parallel-size", "-dp")
    servers = number("--api-server-count", "-asc")
    return data * (1 + tensor * pipeline) + max(servers, 1)


def check_endpoint_token(site: Site) -> Iterator[Finding]:
    """Whether the engine can read the secret that the sidecar left for it."""
    if site.embedded or PLUGIN not in site.points(ENDPOINT):
        return
    path = site.environment.get(TOKEN_FILE_VARIABLE)
    run_dir = site.environment.get(RUN_DIR_VARIABLE)
    if not path and run_dir:
        path = os.path.join(run_dir, TOKEN_NAME)
    if not path:
        return
    if not os.path.lexists(path):
        if site.environment.get(TOKEN_FILE_VARIABLE):
            yield error(
                "endpoint_token",
                f"{TOKEN_FILE_VARIABLE}={path}: there is no such file, so our route answers 503",
                "mount the Secret there, or unset it and share the run directory",
            )
        else:
            yield ok("endpoint_token", "not there yet: the sidecar writes it when it starts")
    elif not _holds_a_token(path):
        yield error(
            "endpoint_token",
            f"{ourselves()} cannot read {path}, or it holds no secret: our route answers 503",
            "give both containers the pod's fsGroup and the run directory mode 2770; or remove the file and"
            " restart the sidecar, which writes it anew",
        )
    else:
        yield ok("endpoint_token", "the secret of our route can be read")


def _holds_a_token(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return bool(os.read(fd, 4096).decode("ascii").strip())
        finally:
            os.close(fd)
    except (OSError, UnicodeDecodeError):
        return False


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
