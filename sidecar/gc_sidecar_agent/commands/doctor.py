"""`gc-sidecar doctor`, the engine's half: whether this container lets the agent into vLLM, and what else sets GC.

It judges the environment of the engine that runs here, or else the one that it is started in, and asks the
engine's own interpreter, in a process of its own. It imports neither vLLM nor torch, and leaves nothing behind.
Here are its flags and the table of its checks; what they do is in `gc_sidecar_agent.doctor`.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from gc_sidecar_agent.cli import EXIT_USAGE
from gc_sidecar_agent.commands.options import UsageError, add_option, add_switch, warn
from gc_sidecar_agent.doctor import (
    engine_checks,
    gc_checks,
    page_checks,
    plugin_checks,
    run_dir_checks,
    tree_checks,
)
from gc_sidecar_agent.doctor.engine_process import (
    Engine,
    find_engines,
    is_in_our_container,
    read_engine,
    starter_of,
)
from gc_sidecar_agent.doctor.findings import (
    EXIT_CODES,
    Finding,
    add_report_arguments,
    examine,
    report,
)
from gc_sidecar_agent.doctor.site import Site, survey

DESCRIPTION = """\
Find out why the agent does not get into vLLM, or will not, and what else interferes with its garbage
collection. Run it in the engine's container. Where an engine runs, its own environment, command line and
interpreter are judged; where none does, those of this shell.

It imports neither vLLM nor torch (but for --worker-extension-cls, in a process of its own), leaves nothing
behind, and has to run as the engine's user to see its environment.
"""

EXAMPLES = """\
examples:
  /opt/gc-agent/bin/gc-sidecar doctor
  /opt/gc-agent/bin/gc-sidecar doctor --json | jq '.findings[] | select(.level != "ok")'
  /opt/gc-agent/bin/gc-sidecar doctor --worker-extension-cls my_package.MyExtension
  /opt/gc-agent/bin/gc-sidecar doctor --preflight --fail-on error &&
    exec /opt/gc-agent/bin/with-agent vllm serve MODEL
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `doctor` in the engine's container."""
    parser.description = DESCRIPTION
    parser.epilog = f"{EXAMPLES}\n{EXIT_CODES}"
    add_engine_arguments(parser)
    add_report_arguments(parser)


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
    return report(findings, args.json, args.fail_on)


def choose_engines(pid: int | None, preflight: bool) -> list[Engine]:
    """The engines to judge, none where there are none. Raises UsageError."""
    if preflight:
        return []
    if pid is None:
        return find_engines()
    engine = read_engine(starter_of(pid))
    if engine is None:
        raise UsageError(f"--pid {pid}: there is no such process here")
    if not is_in_our_container(pid):
        raise UsageError(f"--pid {pid}: it lives in another container; run doctor there")
    return [engine]


def _find_python(named: str | None) -> str | None:
    if named is None:
        return None
    found = shutil.which(named)
    if found is None:
        raise UsageError(f"--python {named}: there is no such program here")
    return found


CHECKS: tuple[Callable[[Site], Iterator[Finding]], ...] = (
    engine_checks.check_engine,
    tree_checks.check_agent_tree,
    engine_checks.check_interpreter,
    engine_checks.check_collector,
    tree_checks.check_python_path,
    tree_checks.check_agent_import,
    plugin_checks.check_vllm,
    plugin_checks.check_entry_point,
    plugin_checks.check_plugins_allowed,
    plugin_checks.check_plugins_shut_out,
    plugin_checks.check_endpoint_plugin,
    plugin_checks.check_worker_extension,
    gc_checks.check_dev_mode,
    gc_checks.check_gc_debug,
    gc_checks.check_gc_variables,
    gc_checks.check_gate,
    run_dir_checks.check_run_dir,
    run_dir_checks.check_endpoint_token,
    page_checks.check_pages,
    page_checks.check_live_gc,
    page_checks.check_live_agents,
)
