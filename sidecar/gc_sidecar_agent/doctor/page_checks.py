"""Checks of what the agents say of themselves on their pages: that they are there, GC's state, their own faults.

Only they can tell what is so in processes that run. Where none runs, there are no pages and nothing is said.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import gc_sidecar_agent
from gc_sidecar_agent.doctor.findings import Finding, error, ok, some, warning
from gc_sidecar_agent.doctor.site import RUN_DIR_VARIABLE, Site, living_pages
from gc_sidecar_agent.page import PageContent
from gc_sidecar_agent.rules import HELD_OFF

# Long enough for several heartbeats: what is odd in both readings is odd.
PAGES_AGAIN_S = 0.3


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
        again = living_pages(site.environment[RUN_DIR_VARIABLE])
        still = {page.name: what for page in again if (what := _oddity(page))}
        odd = {name: what for name, what in still.items() if name in odd}
    for what in sorted(set(odd.values())):
        names = [_place_of(page) for page in site.pages if odd.get(page.name) == what]
        yield warning(
            "live_gc",
            f"{some(names)}: {what}",
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
    if mode == "freeze" and third != HELD_OFF:
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


def _place_of(page: PageContent) -> str:
    """`worker dp0 rank 1`, by the page's name, which cannot lie about its form."""
    role, dp_rank, rank = page.name.split("-")[:3]
    return f"{role} {dp_rank} rank {rank[1:]}"


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
