"""Runs the blocks of a sweep against a sidecar: enters each policy, keeps its lease, looks at pauses and memory.

However it ends, the engine is back in normal GC: by a restore, or, where nobody is left to ask for one, by the
lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote

from gc_sidecar.sweep.driver import Driver, Sample
from gc_sidecar.sweep.journal import BlockRecord, Memory, Pause
from gc_sidecar.sweep.plan import Block, Plan, Point
from gc_sidecar_agent.client import Client, ClientError

# Renewed three times in that; a sweep that is killed leaves its policy in force no longer.
LEASE_S = 90.0
RESTORE_WITHIN_S, RETRY_S = 30.0, 0.2
MAXIMUM_PAUSES = 10_000
# Shorter ones make no token late; there may be thousands a minute.
SHORTEST_PAUSE_S = 0.0005
# What is long here is the whole question, so no limit is set on it.
WINDOW_LIMIT_MS = 3_600_000


class ClientMeter:
    """This process's own collections, for they make tokens look late as well."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._seen: list[tuple[float, float, int]] = []

    def __enter__(self) -> ClientMeter:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        now_s = time.monotonic()
        if phase == "start":
            self._since_s = now_s
        elif now_s - self._since_s >= SHORTEST_PAUSE_S:
            self._seen.append((self._since_s, now_s - self._since_s, info["generation"]))

    def pauses(self, clock_offset_s: float) -> tuple[Pause, ...]:
        """Those so far."""
        return tuple(
            Pause(start_s + clock_offset_s, duration_s, generation, "auto", "this client")
            for start_s, duration_s, generation in self._seen
        )


class Session:
    """A sweep at work. `tell` is called with a line at every step of it."""

    def __init__(
        self, client: Client, driver: Driver, plan: Plan, owner: str, tell: Callable[[str], None]
    ) -> None:
        self._client = client
        self._driver = driver
        self._plan = plan
        self._owner = owner
        self._tell = tell

    def run_block(self, block: Block) -> BlockRecord:
        """One block from its policy's beginning to its end. Raises ClientError, DriveError."""
        with self._policy(block.policy), ClientMeter() as meter:
            clock_offset_s = time.time() - time.monotonic()
            began_s = time.time()
            with self._window(block) as window_id:
                memory = [self._memory()]
                points: list[tuple[Point, tuple[Sample, ...]]] = []
                total = len(self._plan.blocks())
                for number, point in enumerate(block.points, 1):
                    where = f"point {number} of {len(block.points)}: {point}"
                    self._tell(f"{block.name} of {total}, {where}")
                    samples = asyncio.run(self._drive(point))
                    points.append((point, tuple(samples)))
                    memory.append(self._memory())
            answer = self._client.request("GET", f"/gc/windows/{quote(window_id)}")
            pauses, lost = self._pauses(began_s)
            return BlockRecord(
                number=block.number,
                policy=block.policy,
                clock_offset_s=clock_offset_s,
                points=tuple(points),
                pauses=pauses,
                client_pauses=meter.pauses(clock_offset_s),
                lost_pauses=lost,
                memory=tuple(memory),
                verdict=dict(answer.body["window"]["verdict"]),
            )

    @contextlib.contextmanager
    def _window(self, block: Block) -> Iterator[str]:
        """A window that is closed at the end, however that comes: no more than 16 may be open."""
        window_id = f"{self._owner}-{block.number}-{time.time_ns()}"
        limits = {"max_pause_ms": WINDOW_LIMIT_MS, "max_stall_share": 1}
        fields = {"window_id": window_id, "name": block.name, **limits}
        self._client.request("POST", "/gc/windows", fields)
        try:
            yield window_id
        finally:
            with contextlib.suppress(ClientError):
                self._client.request("POST", f"/gc/windows/{quote(window_id)}/close", {})

    async def _drive(self, point: Point) -> list[Sample]:
        if self._plan.warm_up:
            await self._driver.drive(point, self._plan.warm_up)
        return await self._driver.drive(point, self._plan.requests)

    @contextlib.contextmanager
    def _policy(self, policy: str) -> Iterator[None]:
        self.restore()  # of a sweep before this one, that was killed
        status = self._client.get_status().body["policy"]
        if status["mode"] != "off":
            raise ClientError(
                "owned_by_other",
                f"the engine is under the {status['mode']} policy of {status['owner']!r}",
                remedy=f"end it first: gc-sidecar restore --owner {shlex.quote(str(status['owner']))}",
            )
        if policy == "off":
            yield
            return
        fields: dict[str, Any] = {"mode": policy, "owner": self._owner, "lease_s": LEASE_S}
        if policy == "budget":
            fields["pause_budget_ms"] = self._plan.pause_budget_ms
        ended = threading.Event()
        failures: list[ClientError] = []
        keeper = threading.Thread(
            target=self._keep_lease, args=(ended, failures), name="sweep-lease", daemon=True
        )
        try:
            self._client.request("PUT", "/gc/policy", fields, timeout_s=60.0)
            keeper.start()
            yield
        finally:
            # Also where we were interrupted before the answer came: the policy may be in force.
            ended.set()
            with _uninterrupted():
                self.restore()
        if failures:
            raise failures[0]

    def _keep_lease(self, ended: threading.Event, failures: list[ClientError]) -> None:
        while not ended.wait(LEASE_S / 3):
            try:
                self._client.renew_lease(owner=self._owner, lease_s=LEASE_S)
            except ClientError as error:
                if not ended.is_set():
                    failures.append(error)

    def restore(self) -> None:
        """Back to normal GC, where the policy is ours. Where that cannot be had, the lease does it."""
        give_up_s = time.monotonic() + RESTORE_WITHIN_S
        while time.monotonic() < give_up_s:
            try:
                self._client.restore(owner=self._owner)
            except ClientError as error:
                if error.code != "operation_running":
                    return
                time.sleep(RETRY_S)  # our own entering, say, which was interrupted
            else:
                return

    def _memory(self) -> Memory:
        rows = self._client.get_status().body["processes"]
        return Memory(time.time(), sum(row["memory"]["anonymous_bytes"] or 0 for row in rows))

    def _pauses(self, since_s: float) -> tuple[tuple[Pause, ...], int]:
        since = datetime.fromtimestamp(since_s, timezone.utc).isoformat().replace("+00:00", "Z")
        path = f"/gc/pauses?since={since}&min_duration_s={SHORTEST_PAUSE_S}&limit={MAXIMUM_PAUSES}"
        body = self._client.request("GET", path, timeout_s=60.0).body
        found = tuple(
            Pause(
                _seconds(each["started_at"]),
                each["duration_s"],
                each["gc_generation"],
                each["trigger"],
                f"{'+'.join(each['roles'])} dp{each['dp_rank']} rank {each['rank']}",
            )
            for each in reversed(body["pauses"])
        )
        return found, int(body["matching"]) - len(found) + int(body["lost"])


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Whoever is impatient and interrupts a second time would keep the engine from its normal GC."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _seconds(date: str) -> float:
    return datetime.fromisoformat(date.replace("Z", "+00:00")).timestamp()
