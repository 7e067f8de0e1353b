"""Checks of the engine itself: whether its environment can be judged, and which Python and collector it has.

What they are given is a `Site`. Whether the agent gets into that Python is asked in `tree_checks`.
"""

from __future__ import annotations

from collections.abc import Iterator

from gc_sidecar_agent.collector import GENERATIONAL, UNSUPPORTED_REASONS
from gc_sidecar_agent.doctor.engine_process import VLLM_TITLE
from gc_sidecar_agent.doctor.findings import Finding, error, ok, ourselves, warning
from gc_sidecar_agent.doctor.site import Site

PYTHON_FLOOR = (3, 10)


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
