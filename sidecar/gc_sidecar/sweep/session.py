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
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

from gc_sidecar.sweep.analysis import CLOCK_S
from gc_sidecar.sweep.driver import DriveError, Driver, Sample
from gc_sidecar.sweep.journal import BlockRecord, Memory, Pause, Reason
from gc_sidecar.sweep.plan import Block, Plan, Point
from gc_sidecar_agent.client import Client, ClientError
from gc_sidecar_agent.supervise import ENDING

# Renewed twice in that; a sweep that is killed leaves its policy in force no longer.
LEASE_S = 90.0
RENEWAL_WITHIN_S = 5.0
RESTORE_WITHIN_S, RETRY_S = 30.0, 0.2
MAXIMUM_PAUSES = 10_000
# Shorter ones make no token late; there may be thousands a minute.
SHORTEST_PAUSE_S = 0.0005
# The window of a sweep that was killed is closed after this: there may be only so many. It is asked for four times
# meanwhile, for a point may take longer.
WINDOW_PATIENCE_S = 240.0
# Of so many tokens a sidecar knows, if they are of its engine.
LEAST_TOKENS = 100
# Of the time that was read before, for a pause is told of when it has ended.
OVERLAP_S = 5.0
# What a window says of the pauses that a sweep is about. Any other reason is a disturbance.
EXPECTED_REASONS = ("pause_over_limit", "stall_over_limit", "lost_records")
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
        self,
        client: Client,
        driver: Driver,
        plan: Plan,
        owner: str,
        tell: Callable[[str], None],
        lease_s: float = LEASE_S,
    ) -> None:
        self._client = client
        self._driver = driver
        self._plan = plan
        self._owner = owner
        self._tell = tell
        self._lease_s = lease_s

    def run_block(self, block: Block) -> BlockRecord:
        """One block from its policy's beginning to its end. Raises ClientError, DriveError."""
        self._driver.begin(block.number)
        with self._policy(block.policy) as lost_lease, ClientMeter() as meter:
            offset_s = clock_offset_s()
            with self._window(block) as window_id:
                pauses = EnginePauses(self._client, time.time())
                memory = [self._memory()]
                points: list[tuple[Point, tuple[Sample, ...]]] = []
                total = len(self._plan.blocks())
                for number, point in enumerate(block.points, 1):
                    where = f"point {number} of {len(block.points)}: {point}"
                    self._tell(f"{block.name} of {total}, {where}")
                    samples = asyncio.run(
                        self._driver.drive(point, self._plan.requests, self._plan.warm_up)
                    )
                    if lost_lease:
                        raise lost_lease[-1]
                    points.append((point, tuple(samples)))
                    memory.append(self._memory())
                    pauses.read()
                was_open = self._client.get_window(window_id).body["window"]["state"] == "open"
            answer = self._client.get_window(window_id)
            pauses.read()
            verdict = answer.body["window"]["verdict"]
            disturbances = [
                Reason(str(each["code"]), str(each["detail"]))
                for each in verdict["reasons"]
                if each["code"] not in EXPECTED_REASONS
            ]
            if not was_open:
                detail = "the window was closed before the block had ended"
                disturbances.append(Reason("window_closed", detail))
            step_s = clock_offset_s() - offset_s
            if abs(step_s) > CLOCK_S:
                detail = (
                    f"this machine's clock was set by {step_s:+.3f} s, so no token has its pause"
                )
                disturbances.append(Reason("clock_was_set", detail))
            return BlockRecord(
                number=block.number,
                policy=block.policy,
                clock_offset_s=offset_s,
                points=tuple(points),
                pauses=pauses.found,
                client_pauses=meter.pauses(offset_s),
                lost_pauses=int(verdict["lost_records"]) + pauses.left_out,
                pause_count=sum(
                    totals["count"] or 0
                    for process in verdict["processes"]
                    for totals in process["pauses"].values()
                ),
                memory=tuple(memory),
                disturbances=tuple(disturbances),
                doubts=(
                    *doubts(verdict["latency"]["tokens"], points, self._driver.url),
                    *pauses.doubts(),
                ),
            )

    @contextlib.contextmanager
    def _window(self, block: Block) -> Iterator[str]:
        """A window that is closed at the end, however that comes: no more than 16 may be open."""
        window_id = f"sweep-{block.number + 1}-{time.time_ns()}"
        limits = {"max_pause_ms": WINDOW_LIMIT_MS, "max_stall_share": 1}
        self._client.open_window(
            window_id=window_id, name=block.name, abandon_after_s=WINDOW_PATIENCE_S, **limits
        )
        ended = threading.Event()
        keeper = threading.Thread(
            target=self._keep_window, args=(ended, window_id), name="sweep-window", daemon=True
        )
        try:
            keeper.start()
            yield window_id
        finally:
            ended.set()
            with contextlib.suppress(ClientError):
                self._client.close_window(window_id)

    def _keep_window(self, ended: threading.Event, window_id: str) -> None:
        """Ask for it now and then, so that it is not taken for abandoned."""
        while not ended.wait(WINDOW_PATIENCE_S / 4):
            with contextlib.suppress(ClientError):
                self._client.get_window(window_id)

    @contextlib.contextmanager
    def _policy(self, policy: str) -> Iterator[list[ClientError]]:
        """Under a policy; what is given grows when its lease is lost."""
        self.restore()  # of a sweep before this one, that was killed
        status = self._client.get_status().body["policy"]
        if status["mode"] != "off":
            raise ClientError(
                "owned_by_other",
                f"the engine is under the {status['mode']} policy of {status['owner']!r}",
                remedy=f"end it first: gc-sidecar restore --owner {shlex.quote(str(status['owner']))}",
            )
        if policy == "off":
            yield []
            return
        fields: dict[str, Any] = {"mode": policy, "owner": self._owner, "lease_s": self._lease_s}
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
            yield failures
        finally:
            # Also where we were interrupted before the answer came: the policy may be in force.
            ended.set()
            with _uninterrupted():
                self.restore()
        if failures:
            raise failures[0]

    def _keep_lease(self, ended: threading.Event, lost: list[ClientError]) -> None:
        """Renew it now and then, sooner where that fails; it is lost where nobody could until it had ended."""
        renewed_s = time.monotonic()
        wait_s = self._lease_s / 3
        while not ended.wait(wait_s):
            asked_s = time.monotonic()
            fields = {
                "owner": self._owner,
                "lease_s": self._lease_s,
                "deadline_s": RENEWAL_WITHIN_S,
            }
            try:
                self._client.request("POST", "/gc/lease", fields, timeout_s=2 * RENEWAL_WITHIN_S)
            except ClientError as error:
                wait_s = self._lease_s / 30
                if time.monotonic() - renewed_s > self._lease_s:
                    lost.append(error)
            else:
                renewed_s, wait_s = asked_s, self._lease_s / 3

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
        sizes = [row["memory"]["anonymous_bytes"] for row in rows if row["state"] != "gone"]
        return Memory(time.time(), None if None in sizes else sum(sizes))


class EnginePauses:
    """The pauses of the engine's processes, read now and then, for a sidecar keeps only the newest of them."""

    def __init__(self, client: Client, since_s: float) -> None:
        self.left_out = 0
        self._client = client
        self._read_to_s = self._began_s = since_s
        self._known_since_s = since_s
        self._found: dict[tuple[str, float, float], Pause] = {}

    def read(self) -> None:
        """Those that came since."""
        since_s, self._read_to_s = self._read_to_s - OVERLAP_S, time.time()
        since = datetime.fromtimestamp(since_s, timezone.utc).isoformat().replace("+00:00", "Z")
        path = f"/gc/pauses?since={since}&min_duration_s={SHORTEST_PAUSE_S}&limit={MAXIMUM_PAUSES}"
        body = self._client.request("GET", path, timeout_s=60.0).body
        for each in body["pauses"]:
            process = f"{'+'.join(each['roles'])} dp{each['dp_rank']} rank {each['rank']}"
            pause = Pause(
                seconds_of(each["started_at"]),
                each["duration_s"],
                each["gc_generation"],
                each["trigger"],
                process,
            )
            self._found[process, pause.started_s, pause.duration_s] = pause
        self.left_out += int(body["matching"]) - len(body["pauses"])
        complete_since = body["complete_since"]
        if complete_since is not None and seconds_of(complete_since) > since_s + OVERLAP_S:
            self._known_since_s = seconds_of(complete_since)

    @property
    def found(self) -> tuple[Pause, ...]:
        """All of them in the order of their time."""
        return tuple(sorted(self._found.values(), key=lambda pause: pause.started_s))

    def doubts(self) -> list[Reason]:
        """Where some were forgotten before they were read, more outliers than those may be theirs."""
        if self._known_since_s == self._began_s:
            return []
        until = datetime.fromtimestamp(self._known_since_s, timezone.utc).strftime("%H:%M:%SZ")
        detail = f"the sidecar had forgotten some pauses before {until} when it was asked: plan smaller points"
        return [Reason("pauses_forgotten", detail)]


def doubts(
    seen: int | None, points: Iterable[tuple[Point, Sequence[Sample]]], engine_url: str
) -> list[Reason]:
    """Whether the engine of the sidecar made these tokens, of which it has `seen` so many; None: it cannot tell.

    Raises DriveError where it did not: what that engine paused says nothing of them.
    """
    samples = [sample for _, of_point in points for sample in of_point]
    came = sum(len(sample.tokens_s) - 1 for sample in samples)
    if came < LEAST_TOKENS:
        return []
    if seen is None:
        detail = (
            f"the sidecar has seen hardly any of the {came:,} tokens that came from {engine_url}: either its"
            " engine is another one, or it keeps no statistics (--disable-log-stats)"
        )
        return [Reason("other_engine", detail)]
    if seen < came / 2:
        raise DriveError(
            f"{came:,} tokens came from {engine_url}, but the sidecar's engine made only {seen:,}: give"
            " --engine-url and --url of the same engine"
        )
    return []


def clock_offset_s() -> float:
    """What added to time.monotonic() makes a date."""
    return time.time() - time.monotonic()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Whoever interrupts in the middle would keep the engine from its normal GC; it counts when that is done."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: came.append(number))
        for number in ENDING
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def seconds_of(date: str) -> float:
    return datetime.fromisoformat(date.replace("Z", "+00:00")).timestamp()
