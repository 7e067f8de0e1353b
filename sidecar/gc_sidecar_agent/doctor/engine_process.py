"""Engines as /proc shows them: which processes started one, their command lines and their environments.

Nothing is judged here. An engine becomes a part of the `Site` (see `site`) that the checks look at.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# What vLLM and the embedded engine write over the command lines of their processes. vLLM writes over the
# environment too, which then cannot be judged.
VLLM_TITLE = "VLLM::"
EMBEDDED_TITLE = re.compile(r"embedded (launcher|api_server|engine_core|worker)\b")


@dataclass(frozen=True)
class Engine:
    """A process that starts an engine, as /proc shows it. `environment` is None where we may not read it."""

    pid: int
    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None = None
    directory: str | None = None
    user: int | None = None

    @property
    def embedded(self) -> bool:
        """Whether it is our embedded engine, which has the agent built in."""
        is_titled = EMBEDDED_TITLE.match(self.arguments[0]) is not None
        return is_titled or CommandLine(self.arguments).module.startswith("gc_sidecar.embedded")

    def flag(self, name: str) -> str | None:
        """The value of a flag on its command line; vLLM takes `_` for `-` too, and the last one wins."""
        value = None
        for position, argument in enumerate(self.arguments):
            flag, has_value, rest = argument.partition("=")
            if flag.replace("_", "-") == name:
                value = rest if has_value else "".join(self.arguments[position + 1 : position + 2])
        return value


class CommandLine:
    """A Python command line: the interpreter's own flags, the module or the script, and what follows."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.flags: list[str] = []
        self.module = ""
        self.script = ""
        self.rest: list[str] = []
        program = os.path.basename(arguments[0]) if arguments else ""
        if program == "vllm":
            self.script, self.rest = arguments[0], list(arguments[1:])
        if not program.startswith("python"):
            return
        left = list(arguments[1:])
        while left and left[0].startswith("-"):
            flag = left.pop(0)
            if re.fullmatch(r"-[A-Za-z]*c", flag):
                return
            if re.fullmatch(r"-[A-Za-z]*m", flag):
                self.flags += [flag[:-1]] if len(flag) > 2 else []
                self.module, self.rest = "".join(left[:1]), left[1:]
                return
            self.flags.append(flag)
            if flag in ("-X", "-W", "--check-hash-based-pycs"):
                self.flags += left[:1]
                del left[:1]
        self.script, self.rest = "".join(left[:1]), left[1:]

    @property
    def is_engine(self) -> bool:
        """Whether this starts a server (or a batch run), not one of vLLM's clients or helpers."""
        if os.path.basename(self.script) == "vllm" or self.module in (
            "vllm",
            "vllm.entrypoints.cli.main",
        ):
            return self.rest[:1] in (["serve"], ["run-batch"])
        return self.module.startswith(("vllm.entrypoints.", "dynamo.vllm", "gc_sidecar.embedded"))


def find_engines() -> list[Engine]:
    """The engines of this container, each by the process that started it."""
    parents: dict[int, int] = {}
    commands: dict[int, tuple[str, ...]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            pid = int(name)
            parent, arguments = _parent_of(pid), _arguments_of(pid)
            if parent is not None and arguments:
                parents[pid], commands[pid] = parent, arguments
    found = set()
    for pid, arguments in commands.items():
        if arguments[0].startswith(VLLM_TITLE):
            found.add(starter_of(pid))
        elif EMBEDDED_TITLE.match(arguments[0]) or CommandLine(arguments).is_engine:
            found.add(pid)
    found -= set(_line_above(os.getpid(), parents))
    first = [pid for pid in found if not found & set(_line_above(parents[pid], parents))]
    engines = [read_engine(pid) for pid in sorted(first) if is_in_our_container(pid)]
    return [engine for engine in engines if engine is not None]


def read_engine(pid: int) -> Engine | None:
    """What /proc tells of the process; None where it is none, or has ended."""
    arguments = _arguments_of(pid)
    if not arguments:
        return None
    environment: dict[str, str] | None = None
    directory, user = None, None
    try:
        user = os.stat(f"/proc/{pid}").st_uid
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if not arguments[0].startswith(VLLM_TITLE):
            environment = dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)
        directory = os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        pass
    if directory is not None and not os.path.isdir(directory):
        directory = None
    return Engine(pid, arguments, environment, directory, user)


def interpreter_path(engine: Engine) -> str | None:
    """The interpreter that the engine was started with. Not /proc's `exe`, if it can be helped: that has lost
    the virtual environment."""
    name = engine.arguments[0]
    if os.path.basename(name).startswith("python"):
        if os.sep in name:
            path: str | None = os.path.join(engine.directory or "/", name)
        else:
            path = shutil.which(name, path=(engine.environment or os.environ).get("PATH"))
        if path is not None and os.access(path, os.X_OK):
            return path
    try:
        return os.readlink(f"/proc/{engine.pid}/exe")
    except OSError:
        return None


def _arguments_of(pid: int) -> tuple[str, ...]:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(os.fsdecode(part) for part in line.rstrip(b"\0").split(b"\0")) if line else ()


def _parent_of(pid: int) -> int | None:
    try:
        # The command's name stands in parentheses and may hold anything, parentheses too.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def starter_of(pid: int) -> int:
    """Who started a process that vLLM has titled: the server, or a script that made an LLM(). It still has its
    command line and its environment."""
    while "".join(_arguments_of(pid)[:1]).startswith(VLLM_TITLE):
        parent = _parent_of(pid) or 0
        above = os.path.basename("".join(_arguments_of(parent)[:1]))
        if not above.startswith(("python", VLLM_TITLE)):
            break
        pid = parent
    return pid


def _line_above(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    """A process, its parent, and so on."""
    while pid in parents:
        yield pid
        pid = parents[pid]


def is_in_our_container(pid: int) -> bool:
    """Whether it has our mounts, so that its paths mean here what they mean to it."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    except OSError:
        return True  # not ours to read; its paths are all that we go by
