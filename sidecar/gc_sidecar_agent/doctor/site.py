"""What the checks look at, gathered once: the engine, its environment, its interpreter's answers, its pages.

`survey` makes a `Site` of what `engine_process` and `interpreter` find. The checks are in the modules `*_checks`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gc_sidecar_agent
from gc_sidecar_agent.doctor.engine_process import Engine
from gc_sidecar_agent.doctor.interpreter import FACTS_S, Interpreter, interpreter_for, look_around
from gc_sidecar_agent.page import PageContent, PageError, list_pages, read_page

# Spelled out again: the module that owns it, `agent`, cannot be imported before CPython 3.10, and there doctor has
# to say so.
RUN_DIR_VARIABLE = "GC_SIDECAR_RUN_DIR"

PLUGIN = "gc_sidecar"
GENERAL, ENDPOINT = "vllm.general_plugins", "vllm.endpoint_plugins"
PLUGINS_VARIABLE = "VLLM_PLUGINS"
DISTRIBUTION = re.compile(r"gc_sidecar_agent-.*\.dist-info")


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
    def has_tree(self) -> bool:
        """Whether `directory` holds an agent that vLLM could find; it may be an installed gc-sidecar instead."""
        return bool(distributions(self.directory))

    @property
    def with_agent(self) -> str:
        """The program that puts the agent on the engine's path."""
        if self.has_tree:
            return f"{self.directory}/bin/with-agent"
        return "DIR/bin/with-agent, DIR written by `gc-sidecar install-agent DIR`"

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
        return path_entries(self.environment)

    @property
    def is_on_path(self) -> bool:
        """Whether the injected tree is on that path."""
        return holds(self.python_path, self.directory)


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
    if environment is own and not holds(path_entries(own), directory):
        # As `with-agent` would have it.
        asked["PYTHONPATH"] = os.pathsep.join([directory, *path_entries(own)])
    interpreter = interpreter_for(engine, python or sys.executable, asked)
    run_dir = environment.get(RUN_DIR_VARIABLE)
    return Site(
        directory=directory,
        engine=engine,
        environment=environment,
        own_environment=own,
        interpreter=interpreter,
        facts=interpreter.ask(look_around, directory, timeout_s=FACTS_S),
        extension=extension or (engine.flag("--worker-extension-cls") if engine else None),
        pages=living_pages(run_dir) if run_dir else (),
    )


def find_tree(environment: Mapping[str, str]) -> str:
    """The injected tree: where this runs from, unless that is an installed gc-sidecar and PYTHONPATH knows of
    a tree."""
    own = str(Path(gc_sidecar_agent.__file__).absolute().parents[1])
    candidates = [own, *path_entries(environment)]
    return next((each for each in candidates if distributions(each)), own)


def distributions(directory: str) -> list[str]:
    """The dist-infos of the agent in a directory, by which vLLM finds it; a sound tree has one."""
    try:
        return sorted(name for name in os.listdir(directory) if DISTRIBUTION.fullmatch(name))
    except OSError:
        return []


def path_entries(environment: Mapping[str, str]) -> list[str]:
    """What its PYTHONPATH names."""
    return [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def holds(entries: Sequence[str], directory: str) -> bool:
    """Whether `directory` is among the entries of a path, under whatever name."""
    return os.path.realpath(directory) in map(os.path.realpath, entries)


def living_pages(run_dir: str) -> list[PageContent]:
    """The pages of processes that run; none where the directory cannot be read."""
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
