"""Several sidecars as one: a policy is entered and a window opened in all of their engines or in none.

One sidecar is a fleet of one. `dns+http://NAME:PORT` stands for every address that a name has, as a headless
Service gives it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from gc_sidecar_agent.client import Client, ClientError, Unreachable

DNS = "dns+"
# Renewed so often in a lease; a failed renewal is repeated sooner.
RENEWALS_PER_LEASE, RETRIES_PER_LEASE = 4, 20
# How often a window is looked at while a command runs, and what in it says that an engine is not what it was.
WATCH_S = 2.0
LOST_CODES = ("no_process", "process_gone", "process_restarted")
REQUEST_S = 10.0
# A sidecar that cannot be reached for so long is lost, where no lease says so earlier.
UNREACHABLE_S = 60.0
RESTORE_WITHIN_S, RETRY_S = 60.0, 0.5
POLICY_CODES_TO_RETRY = ("operation_running", "unreachable", "no_answer")

Result = TypeVar("Result")


class FleetError(Exception):
    """What was asked for was not done by all, and is undone where it was; `str()` says by whom it was not."""


@dataclass
class Member:
    """One sidecar and what is known of its engine."""

    client: Client
    status_before: dict[str, Any] = field(default_factory=dict)
    status_during: dict[str, Any] = field(default_factory=dict)
    status_after: dict[str, Any] = field(default_factory=dict)
    version: dict[str, Any] = field(default_factory=dict)
    window: dict[str, Any] = field(default_factory=dict)
    # Why there is no verdict of its window.
    window_error: str | None = None
    restore_error: str | None = None
    has_policy: bool = False
    has_window: bool = False

    @property
    def url(self) -> str:
        """Where it is."""
        return self.client.url


def addresses(urls: Iterable[str]) -> list[tuple[str, str | None]]:
    """The address of every sidecar that `urls` stand for, and the name under which it is to be asked (None: its
    address). Raises ValueError, OSError."""
    found: list[tuple[str, str | None]] = []
    for url in urls:
        if not url.startswith(DNS):
            found.append((url, None))
            continue
        parts = urlsplit(url[len(DNS) :])
        if not parts.hostname or parts.scheme not in ("http", "https"):
            raise ValueError(f"{url!r} is not dns+http://NAME:PORT")
        port = parts.port or 9470
        resolved = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        for host in sorted({str(each[4][0]) for each in resolved}):
            named = f"[{host}]" if ":" in host else host
            found.append((f"{parts.scheme}://{named}:{port}", f"{parts.hostname}:{port}"))
    return list(dict.fromkeys(found))


def why_not_ready(members: Sequence[Member]) -> str | None:
    """What keeps the first engine that is not ready; None where all are."""
    for member in members:
        try:
            member.client.request("GET", "/readyz", timeout_s=REQUEST_S)
            status = member.client.request("GET", "/gc", timeout_s=REQUEST_S).body
        except ClientError as error:
            return f"{member.url}: {error.detail}"
        coverage = status.get("coverage") or {}
        for row in status.get("processes") or []:
            if row.get("state") in ("uncovered", "gone", "stale", "refused"):
                place = f"{row.get('role')} dp{row.get('dp_rank')} rank {row.get('rank')}"
                return f"{member.url}: {place}: {row.get('reason') or row.get('state')}"
        if not coverage.get("expected"):
            return f"{member.url}: no process of an engine is seen yet"
    return None


class Fleet:
    """These sidecars. Every method does its part with all of them at once."""

    def __init__(self, members: Sequence[Member], owner: str, lease_s: float) -> None:
        self.members = tuple(members)
        self.owner = owner
        self.lease_s = lease_s
        self._ended = threading.Event()
        self._lost: list[str] = []

    # --- before ---

    def look(self) -> None:
        """Note how every engine is found. Raises FleetError."""

        def look(member: Member) -> None:
            member.status_before = member.client.get_status().body
            member.version = member.client.request("GET", "/version").body

        self._all("cannot be asked", look)

    def enter(self, mode: str, **fields: Any) -> None:
        """Enter a policy everywhere. Raises FleetError; then it is in force nowhere."""

        def enter(member: Member) -> None:
            if self._ended.is_set():
                return
            # Set before it is asked for: whether it came to pass is not known where the answer is lost.
            member.has_policy = True
            sent = {"mode": mode, "owner": self.owner, "lease_s": self.lease_s, **fields}
            known = {name: value for name, value in sent.items() if value is not None}
            member.client.request("PUT", "/gc/policy", known, timeout_s=60.0)

        self._all(f"did not enter {mode}", enter)

    def open_windows(self, window_id: str, **fields: Any) -> None:
        """Open a window everywhere. Raises FleetError."""

        def open_one(member: Member) -> None:
            if self._ended.is_set():
                return
            member.has_window = True
            member.client.open_window(window_id=window_id, **fields)
            member.status_during = member.client.get_status().body

        self._all("did not open a window", open_one)

    # --- during ---

    def keep(self, window_id: str) -> None:
        """From now on renew every lease, and watch for an engine that is lost; `lost` tells."""
        for member in self.members:
            for work in (self._renew, lambda each: self._watch(each, window_id)):
                threading.Thread(target=work, args=(member,), daemon=True).start()

    @property
    def lost(self) -> str | None:
        """Why the measurement cannot be what it should be any more."""
        return self._lost[0] if self._lost else None

    def _renew(self, member: Member) -> None:
        if not member.has_policy:
            return
        renewed_s = time.monotonic()
        wait_s = self.lease_s / RENEWALS_PER_LEASE
        fields = {"owner": self.owner, "lease_s": self.lease_s, "deadline_s": REQUEST_S / 2}
        while not self._ended.wait(wait_s):
            asked_s = time.monotonic()
            try:
                member.client.request("POST", "/gc/lease", fields, timeout_s=REQUEST_S)
            except ClientError as error:
                wait_s = self.lease_s / RETRIES_PER_LEASE
                if time.monotonic() - renewed_s >= self.lease_s:
                    self._lose(f"{member.url}: the lease has ended: {error.detail}")
                    return
            else:
                renewed_s, wait_s = asked_s, self.lease_s / RENEWALS_PER_LEASE

    def _watch(self, member: Member, window_id: str) -> None:
        seen_s = time.monotonic()
        while not self._ended.wait(WATCH_S):
            try:
                window = _window(member, window_id)
            except Unreachable as error:
                if time.monotonic() - seen_s >= UNREACHABLE_S:
                    self._lose(f"{member.url}: the sidecar is lost: {error.detail}")
                    return
                continue
            except ClientError:
                return  # a sidecar that has restarted knows no window; the verdict will say so
            seen_s = time.monotonic()
            for reason in window["verdict"]["reasons"]:
                if reason["code"] in LOST_CODES:
                    self._lose(f"{member.url}: the engine is lost: {reason['detail']}")
                    return

    def _lose(self, why: str) -> None:
        if not self._ended.is_set():
            self._lost.append(why)

    # --- after ---

    def give_up(self) -> None:
        """Enter nothing more, and open no window more."""
        self._ended.set()

    def close_windows(self, window_id: str) -> None:
        """Close every window that was opened, and keep its verdict, or why there is none."""
        self._ended.set()

        def close(member: Member) -> None:
            if not member.has_window:
                return
            member.client.close_window(window_id)
            member.window = _window(member, window_id)

        for member, error in self._each(close):
            member.window_error = None if error is None else _told(error)

    def restore(self) -> None:
        """Back to what it was, wherever a policy of ours may be in force; `restore_error` says where that could
        not be had, and the lease ends it."""
        self._ended.set()

        def restore(member: Member) -> None:
            if member.has_policy:
                self._restore_one(member.client)
            try:
                member.status_after = member.client.get_status().body
            except ClientError:  # how it is now is not known, but all that was ours is undone
                pass

        for member, error in self._each(restore):
            member.restore_error = None if error is None else _told(error)

    def _restore_one(self, client: Client) -> None:
        give_up_s = time.monotonic() + RESTORE_WITHIN_S
        while True:
            try:
                client.restore(owner=self.owner)
            except ClientError as error:
                if error.code == "owned_by_other":
                    return  # somebody else's by now, and none of ours is in force
                # Our own entering, say, which was interrupted; or a sidecar that starts again.
                if error.code not in POLICY_CODES_TO_RETRY or time.monotonic() >= give_up_s:
                    raise
                time.sleep(RETRY_S)
            else:
                return

    # --- all at once ---

    def _each(self, work: Callable[[Member], Result]) -> list[tuple[Member, ClientError | None]]:
        """Do it with all of them side by side; what became of each."""

        def attempt(member: Member) -> ClientError | None:
            try:
                work(member)
            except ClientError as error:
                return error
            return None

        with ThreadPoolExecutor(max_workers=len(self.members)) as pool:
            return list(pool.map(lambda member: (member, attempt(member)), self.members))

    def _all(self, what: str, work: Callable[[Member], Result]) -> None:
        failed = [(member, error) for member, error in self._each(work) if error is not None]
        if failed:
            lines = [f"{member.url} {what}: {_told(error)}" for member, error in failed]
            raise FleetError("; ".join(lines))


def _window(member: Member, window_id: str) -> dict[str, Any]:
    window: dict[str, Any] = member.client.get_window(window_id).body["window"]
    return window


def _told(error: ClientError) -> str:
    """What went wrong, and what to do about it."""
    remedy = f" ({error.remedy})" if error.remedy else ""
    return f"{error.detail}{remedy}"
