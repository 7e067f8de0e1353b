"""What the sidecar wants of its engine and what it knows of it: the desired policy, pages and last replies.

The `roster` is made from all three. Nothing here talks to the engine or changes anything in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from gc_sidecar.server.desired import Desired, desired_from_reports
from gc_sidecar.server.engines import Engines
from gc_sidecar.server.forecast import Expected, Forecast
from gc_sidecar.server.obstacle import Obstacle
from gc_sidecar.server.reports import Identity, Key, Reply, Report
from gc_sidecar.server.roster import Roster, take_roll
from gc_sidecar.server.run_dir import RunDir
from gc_sidecar.server.sight import Sight
from gc_sidecar.server.timing import Timing
from gc_sidecar.server.transports import Processes


class Knowledge:
    """`desired` is set by changes and by the end of a lease, everything else follows what is seen."""

    def __init__(self, run_dir: RunDir, sight: Sight, engines: Engines, timing: Timing) -> None:
        self.desired = Desired()
        self.has_spoken = False  # whether this sidecar has been asked to change anything
        self.run_dir = run_dir
        self.sight = sight
        self.engines = engines
        self._forecast = Forecast(sight.log)
        self._timing = timing
        self._replies: dict[str, Report] = {}
        # How often replies were let go of that nothing has replaced: only another RPC can tell what they told.
        self.losses = 0
        # Of the pages as they were when the replies were last held against them.
        self._judged = sight.snapshot
        self._paged: frozenset[str] = frozenset()
        self._cores: frozenset[str] = frozenset()
        # Since when each API server (token) has said that it is ready.
        self._ready_since: dict[str, float] = {}
        # Which process (token) had the desired generation in each place.
        self._applied: dict[Key, str] = {}

    # --- processes ---

    async def look(self, maximum_age_s: float = 0.0) -> None:
        """Read the pages, where the last reading is older, and let go of replies that they disprove."""
        await self.sight.look(maximum_age_s)
        if self.sight.snapshot is not self._judged:
            self._judged = self.sight.snapshot
            self._forecast.notice(self.sight.snapshot.pages)
            self._ready_since = {
                page.report.identity.token: self._ready_since.get(
                    page.report.identity.token, self.sight.snapshot.taken_at
                )
                for page in self.sight.snapshot.pages
                if page.alive
                and page.report.state.ready
                and "api_server" in page.report.identity.roles
            }
            self._forget_disproved()

    def _forget_disproved(self) -> None:
        """A reply outlives neither its engine nor its process, as far as pages tell."""
        snapshot = self.sight.snapshot
        if snapshot.directory is not None and not snapshot.pages:
            return  # nothing can be seen, which disproves nothing
        living = [page.report.identity for page in snapshot.pages if page.alive]
        tokens = frozenset(identity.token for identity in living)
        ended = {page.report.identity.token for page in snapshot.pages} - tokens
        # Whose page was there and is no more; but a reply that came since proves that its process lives.
        vanished = self._paged - tokens - ended
        cores = self.processes.cores
        if cores != self._cores:
            # Another engine, which may have fewer processes, or a part of it that has ended.
            vanished |= self._replies.keys() - tokens
        self._paged, self._cores = tokens, cores
        self.losses += any(token in vanished for token in self._replies)
        self._replies = {
            token: report
            for token, report in self._replies.items()
            if token not in vanished | ended and not _is_succeeded(report.identity, living)
        }

    def roster(self) -> Roster:
        """All processes, by the newest snapshot and the last replies."""
        return take_roll(
            self.sight.snapshot,
            self._replies.values(),
            self.desired,
            self._applied,
            self._timing.stale_after_s,
            contact_lost=not self.engines.is_reachable,
        )

    def expected_pause(self) -> Expected | None:
        """How long a maintenance is expected to take, and in whom; None where nothing was measured yet."""
        return self._forecast.longest(self.sight.snapshot.pages)

    def note_applied(self, roster: Roster) -> None:
        """Remember who has what is desired, to know a successor that has it not."""
        self._applied.update(
            (row.key, row.token) for row in roster.rows if row.state == "applied" and row.token
        )

    def remember(self, replies: tuple[Reply, ...]) -> None:
        """Keep the newest report of each place that came by RPC."""
        reports = [reply.report for reply in replies if reply.report is not None]
        if any(self._is_of_another_engine(report.identity) for report in reports):
            self._replies.clear()
        for report in reports:
            identity = report.identity
            places = set(identity.keys)
            self._replies = {
                token: known
                for token, known in self._replies.items()
                if token == identity.token or not places & set(known.identity.keys)
            }
            self._replies[identity.token] = report
            self._paged -= {identity.token}

    def _is_of_another_engine(self, identity: Identity) -> bool:
        """Whether it is an engine core in the place of another one."""
        return "engine_core" in identity.roles and any(
            "engine_core" in known.identity.roles
            and known.identity.token != identity.token
            and set(known.identity.keys) & set(identity.keys)
            for known in self._replies.values()
        )

    def forget_replies(self) -> None:
        """What they told may be of an engine that is no more."""
        self._replies.clear()

    @property
    def processes(self) -> Processes:
        """The living processes that pages show."""
        identities = [page.report.identity for page in self.sight.snapshot.pages if page.alive]
        return Processes(
            frozenset(identity.token for identity in identities),
            frozenset(i.token for i in identities if "engine_core" in i.roles),
        )

    # --- what is wanted ---

    def adopt(self) -> None:
        """With no word of ours, what processes have already is what is desired.

        That goes beyond the board: a sidecar before us may have ended between its RPC and writing it.
        """
        reports = [page.report for page in self.sight.snapshot.pages if page.alive]
        reports = reports or list(self._replies.values())
        if not reports or (self.has_spoken and self.desired != Desired()):
            return
        found = desired_from_reports(reports)
        if self.desired == Desired() or found.generation > self.desired.generation:
            self.desired = found

    def next_generation(self) -> int:
        """One more than any that was seen: a reply or a page of before cannot be taken for a new one."""
        seen = [self.desired.generation]
        seen += [page.report.state.generation for page in self.sight.snapshot.pages]
        seen += [report.state.generation for report in self._replies.values()]
        if self.run_dir.board.policy is not None:
            seen.append(self.run_dir.board.policy.generation)
        return max(seen) + 1

    # --- what stands in the way ---

    def obstacles(self, roster: Roster) -> list[Obstacle]:
        """Everything that stands in the way of seeing or reaching the engine."""
        found = [self.sight.snapshot.directory] if self.sight.snapshot.directory else []
        found += self.run_dir.obstacles
        if not roster.reports:
            found.append(self.why_nobody())
        for row in roster.rows:
            identity = row.report.identity if row.report else None
            if identity and row.page is None and identity.page_error and self.run_dir.path:
                found.append(
                    Obstacle(
                        "page_error",
                        f"{row.key} has no page: {identity.page_error}",
                        "make the run directory writable for the engine, with room for its pages",
                    )
                )
            if identity and identity.agent_error:
                found.append(Obstacle("agent_error", f"{row.key}: {identity.agent_error}"))
        for page in self.sight.snapshot.unreadable:
            found.append(Obstacle(page.code, f"{page.name}: {page.detail}"))
        is_cut_off = not self.engines.can_reach
        found += [
            replace(each, blocking=is_cut_off, remedy=self._remedy_for(each, roster))
            for each in self.engines.obstacles()
        ]
        if is_cut_off and not any(each.blocking for each in found):
            found.append(Obstacle("engine_unreachable", "no engine can be reached", blocking=True))
        return list(dict.fromkeys(found))

    def _remedy_for(self, obstacle: Obstacle, roster: Roster) -> str | None:
        """Its remedy, in the light of what pages show."""
        ready_since = min(self._ready_since.values(), default=math.inf)
        should_listen = self.sight.snapshot.taken_at - ready_since > self._timing.listening_grace_s
        if obstacle.code == "engine_unreachable" and should_listen:
            return "the engine has started, so this is not its port: correct --engine-url"
        return obstacle.remedy

    def why_nobody(self) -> Obstacle:
        """Why no process is seen."""
        ended = sum(not page.alive for page in self.sight.snapshot.pages)
        if ended:
            return Obstacle(
                "no_pages",
                f"every process of the engine has ended, {ended} in all",
                "see the engine's log and start it again; it takes the policy by itself while the lease runs",
                blocking=True,
            )
        if self.run_dir.path is not None and self.sight.snapshot.directory is None:
            return Obstacle(
                "no_pages",
                f"no living process of an engine has a page in {self.run_dir.path}",
                "start vLLM with `DIR/bin/with-agent` and GC_SIDECAR_RUN_DIR set to the same directory,"
                " and VLLM_PLUGINS, if set, must name gc_sidecar",
                blocking=True,
            )
        return Obstacle(
            "engine_not_connected",
            "no process of an engine has been seen yet",
            "give --engine-url and start the engine with the agent, or share a run directory",
            blocking=True,
        )


def _is_succeeded(identity: Identity, living: Iterable[Identity]) -> bool:
    """Whether the page of a later process stands in one of its places."""
    return any(
        other.token != identity.token
        and other.started_at >= identity.started_at
        and set(other.keys) & set(identity.keys)
        for other in living
    )
