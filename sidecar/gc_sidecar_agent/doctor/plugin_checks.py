"""Checks of vLLM and what it loads: its version, our plugins, whom VLLM_PLUGINS shuts out, the worker extension.

They hold entry points and variables against vLLM's rules. vLLM itself is imported only by `try_extension`, in the
engine's interpreter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gc_sidecar_agent.doctor.findings import Finding, error, ok, some, warning
from gc_sidecar_agent.doctor.interpreter import EXTENSION_S, try_extension
from gc_sidecar_agent.doctor.site import (
    ENDPOINT,
    GENERAL,
    PLUGIN,
    PLUGINS_VARIABLE,
    Site,
    distributions,
)

ENTRY_POINT = "gc_sidecar_agent.plugin:register"
# The groups that VLLM_PLUGINS filters, by what people call their plugins. Endpoint plugins are not among them:
# those are off unless they are named.
FILTERED_GROUPS = {
    GENERAL: "general",
    "vllm.platform_plugins": "platform",
    "vllm.io_processor_plugins": "io processor",
    "vllm.stat_logger_plugins": "stat logger",
}

VLLM_FLOOR = (0, 25)
ENDPOINT_FLOOR = (0, 28)


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
    is_told = not distributions(site.directory) or (site.sees_engine and not site.is_on_path)
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
    installed = {name for group in (*FILTERED_GROUPS, ENDPOINT) for name in site.points(group)}
    # Ours and what was meant to be loaded; where that is nothing, all that would be without the variable.
    others = [name for name in stripped if name in installed and name != PLUGIN]
    wanted = ",".join(dict.fromkeys([PLUGIN, *(others or site.points(GENERAL))]))
    unknown = [name for name in stripped if name not in {"", PLUGIN, *installed}]
    remedy = f"set {PLUGINS_VARIABLE}={wanted}"
    if unknown:
        remedy += f"; no plugin that is installed is called {some(unknown)}"
    if PLUGIN in stripped:
        yield error(
            "plugins_allowed",
            f"{PLUGINS_VARIABLE}={value!r}: vLLM takes the blanks as part of the names",
            f"without blanks: {remedy}",
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
            _extension_remedy(str(answer["extension"]), site.with_agent),
        )
    elif answer.get("clashes"):
        clashes = answer["clashes"]
        yield error(
            "worker_extension",
            f"{name} has {some(clashes)}, which {answer['worker']} has too: vLLM refuses it at its start",
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


def _extension_remedy(failure: str, with_agent: str) -> str:
    missing = re.search(r"No module named '([^']+)'", failure)
    if missing and missing[1].startswith("gc_sidecar_agent"):
        return f"put the agent on the engine's PYTHONPATH: start it with {with_agent}"
    if missing:
        return (
            f"put the directory that holds {missing[1]} on the engine's PYTHONPATH, or install it"
        )
    if failure.startswith(("AttributeError", "ValueError", "TypeError")):
        return "name a class by its full path: --worker-extension-cls package.module.Class"
    return "make the module importable in the engine's image: the error is its own"
