"""Checks of the injected tree, which `gc-sidecar install-agent` writes: complete, on PYTHONPATH, and importable.

They end where the engine's Python can import the agent. Whether vLLM does so is asked in `plugin_checks`.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from gc_sidecar_agent.doctor.findings import Finding, error, ok, some, warning
from gc_sidecar_agent.doctor.site import Site, distributions, path_entries


def check_agent_tree(site: Site) -> Iterator[Finding]:
    if site.embedded:
        return
    names = distributions(site.directory)
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
            f"{len(broken)} files in {site.directory} are not as they were installed: {some(broken)}",
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


def check_python_path(site: Site) -> Iterator[Finding]:
    if site.embedded:
        return
    yield from (_engine_path(site) if site.sees_engine else _shell_path(site))


def _engine_path(site: Site) -> Iterator[Finding]:
    entries = [os.path.realpath(entry) for entry in site.python_path]
    directory = os.path.realpath(site.directory)
    with_agent = f"start it with {site.with_agent}"
    deaf = site.interpreter.deaf
    if deaf:
        yield error(
            "python_path",
            f"the engine runs under `python {deaf}`, which ignores PYTHONPATH, and so the agent",
            f"start it without {deaf}",
        )
    elif directory not in entries and not site.has_tree:
        yield error(
            "python_path",
            f"nothing in the engine's PYTHONPATH ({some(site.python_path) or 'empty'}) is an agent's directory, so"
            " vLLM does not know of the agent",
            with_agent,
        )
    elif directory not in entries:
        yield error(
            "python_path",
            f"{site.directory} is not in the engine's PYTHONPATH ({some(site.python_path) or 'empty'}), so"
            " vLLM does not know of the agent",
            f"{with_agent}, or put it first in PYTHONPATH",
        )
    else:
        place = entries.index(directory)
        behind = f", behind {some(site.python_path[:place])}" if place else ", first"
        yield ok("python_path", f"{site.directory} is in the engine's PYTHONPATH{behind}")
    lost = [
        entry
        for entry in path_entries(site.own_environment)
        if os.path.realpath(entry) not in [*entries, directory] and os.path.exists(entry)
    ]
    if lost and not deaf:
        yield warning(
            "python_path_replaced",
            f"this container's PYTHONPATH has {some(lost)}, and the engine's has not: it was replaced, not"
            " extended",
            f"{with_agent}: that puts the agent before what is there",
        )


def _shell_path(site: Site) -> Iterator[Finding]:
    if site.is_on_path:
        yield ok("python_path", f"{site.directory} is in PYTHONPATH")
        return
    absent = [entry for entry in site.python_path if not os.path.exists(entry)]
    if absent:
        yield warning(
            "python_path",
            f"PYTHONPATH names {some(absent)}, which is not there"
            + (f", and not {site.directory}" if site.has_tree else ""),
            f"correct it, or start vLLM with {site.with_agent}",
        )
    elif site.has_tree:  # else told by agent_tree
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
