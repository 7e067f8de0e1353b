"""`gc-sidecar pauses`: recorded collections as plain lines, and with --follow each new one as it comes.

Here is also how pauses look as a table, for `?format=table` of `GET /gc/pauses`, and the feed of new ones.
"""

from __future__ import annotations

import argparse
import json
import select
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from gc_sidecar_agent.cli import EXIT_OK, EXIT_USAGE
from gc_sidecar_agent.commands.options import (
    ASKING_CODES,
    UsageError,
    add_client_arguments,
    add_option,
    add_switch,
    describe,
    duration,
    duration_with_unit,
    make_client,
    warn,
)
from gc_sidecar_agent.commands.output import count, print_error, role, seconds, table, word

if TYPE_CHECKING:
    # Imported below only where a sidecar is asked: the sidecar prints tables with this module.
    from gc_sidecar_agent.client import Answer, Client

DESCRIPTION = """\
Print the collections that the engine's processes recorded, one line each, oldest first: when it
began, in which process, of which GC generation (gen2 is a full collection), what caused it, how long
it held the process up, and how many objects it freed. Nothing is sent to the engine.

With --follow it goes on with each new one, also after the connection broke or the sidecar was
restarted. What is missing is told on standard error.
"""

EXAMPLES = """\
  gc-sidecar pauses --full --since 5m
  gc-sidecar pauses --follow --min-duration 5ms | tee pauses.log
  gc-sidecar pauses --json --role worker | jq -s 'map(.duration_s) | max'
"""

COLUMNS = ("STARTED", "ROLE", "TRIGGER", "DP", "RANK", "PID", "GEN", "PAUSE", "COLLECTED")
POLL_S = 1.0
# As many as the sidecar tells at once.
MOST = 10_000
# How long after its end a pause may still come: the pages of many processes are read one after another.
LATE_S = 3.0
# How far the beginning of one pause may be told apart in two answers: the sidecar derives it anew each time.
SAME_S = 1.0
# A clock that goes this much faster or slower than ours was set. The sidecar tells its own in whole seconds.
JUMP_S = 5.0
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pauses`."""
    describe(parser, DESCRIPTION, EXAMPLES, ASKING_CODES)
    add_switch(parser, "--follow", "go on with new ones, until Ctrl-C", environment=False)
    add_filter_arguments(parser)
    add_option(
        parser, "--role", metavar="ROLE", environment=False,
        help="only processes with this role: api_server, engine_core or worker",
    )  # fmt: skip
    add_option(
        parser, "--limit", _limit, metavar="N", environment=False,
        help=f"the newest N of those that are recorded (default 1000, at most {MOST:,})",
    )  # fmt: skip
    add_client_arguments(parser)


def add_filter_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say which pauses are meant."""
    add_option(
        parser, "--since", moment, metavar="WHEN", environment=False,
        help="only what ended later: so long ago (5m), or a time (2026-12-01T09:00:00Z)",
    )  # fmt: skip
    add_option(
        parser, "--min-duration", duration_with_unit, metavar="DURATION", environment=False,
        help="only pauses at least this long (5ms)",
    )  # fmt: skip
    add_switch(parser, "--full", "only full collections", environment=False)


def filters(args: argparse.Namespace) -> dict[str, Any]:
    """What these flags say, as parameters of the route."""
    return {
        "since": args.since,
        "min_duration_s": args.min_duration,
        "gc_generation": 2 if args.full else None,
    }


def run(args: argparse.Namespace) -> int:
    """Print what is recorded, and what comes; return the exit code."""
    from gc_sidecar_agent.client import ClientError

    wanted = {**filters(args), "role": args.role}
    try:
        client = make_client(args)
        if args.follow:
            feed = PauseFeed(wanted)
            first = feed.ask(client)
            _print(first.pauses[-(args.limit or 1000) :], args.json)
        else:
            document = ask_pauses(client, {**wanted, "limit": args.limit})
            pauses = pauses_of(document)
            _print(pauses, args.json)
            for note in _notes(document, len(pauses)):
                warn(f"pauses: {note}")
            return EXIT_OK
    except UsageError as error:
        warn(f"pauses: {error}")
        return EXIT_USAGE
    except ClientError as error:
        return print_error("pauses", error, args.json)
    for note in first.notes:
        warn(f"pauses: {note}")
    _follow(feed, args)
    return EXIT_OK


def _follow(feed: PauseFeed, args: argparse.Namespace) -> None:
    """Print what comes, until somebody ends us. Whatever fails from here on may heal."""
    from gc_sidecar_agent.client import ClientError

    broken_at: float | None = None
    while True:
        _wait(POLL_S)
        try:
            # A new client each time: the file with the token may have changed.
            news = feed.ask(make_client(args))
        except (ClientError, UsageError) as error:
            if broken_at is None:
                warn(f"pauses: {word(error)}; trying again every {POLL_S:g} s")
                broken_at = time.monotonic()
            continue
        if broken_at is not None:
            warn(f"pauses: answered again after {time.monotonic() - broken_at:.0f} s")
            broken_at = None
        _print(news.pauses, args.json)
        for note in news.notes:
            warn(f"pauses: {note}")


def ask_pauses(client: Client, parameters: dict[str, Any]) -> dict[str, Any]:
    """`GET /gc/pauses`; a parameter that is None is not sent. Raises ClientError."""
    return _answer(client, parameters).body


def _answer(client: Client, parameters: dict[str, Any]) -> Answer:
    sent = {name: value for name, value in parameters.items() if value is not None}
    return client.request("GET", f"/gc/pauses?{urlencode(sent)}" if sent else "/gc/pauses")


def pauses_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pauses in an answer, oldest first; what is no object is left out."""
    pauses = document.get("pauses")
    if not isinstance(pauses, list):
        return []
    return [pause for pause in reversed(pauses) if isinstance(pause, dict)]


@dataclass(frozen=True)
class News:
    """What is new since the last time: pauses, oldest first, and what to know of those that are missing."""

    pauses: list[dict[str, Any]]
    notes: list[str]


class PauseFeed:
    """The pauses that match `wanted`, each once, however often they are asked for.

    They have no names. One that was told before is known by its process, its length to the nanosecond, and
    about when it began; so it is after a restart of the sidecar, too, which reads them from the pages anew.
    Where the sidecar's clock is set, all that is remembered moves with it.
    """

    def __init__(self, wanted: dict[str, Any]) -> None:
        self._wanted = dict(wanted)
        self._known: dict[tuple[Any, ...], list[float]] = {}
        self._newest_s: float | None = None
        self._complete_since: str | None = None
        self._lost: int | None = None
        # How far the sidecar's clock is ahead of our monotonic one, which nobody sets.
        self._ahead_s: float | None = None

    def ask(self, client: Client) -> News:
        """What has come since the last time; at the first, what is recorded. Raises ClientError."""
        answer = self._ask(client)
        notes = []
        jump_s = self._jump_s(answer)
        if jump_s:
            # Without a beginning, for ours may be of the future now. What we know tells it exactly.
            everything = _answer(client, {**self._wanted, "since": None, "limit": MOST})
            jump_s = self._exact_s(pauses_of(everything.body), jump_s)
        if abs(jump_s) > SAME_S:
            self._shift(jump_s)
            which = "forward" if jump_s > 0 else "back"
            notes.append(f"the sidecar's clock was set {which} by {abs(jump_s):.0f} s")
            answer = self._ask(client)
        told = pauses_of(answer.body)
        pauses = list(self._unknown(told))
        notes += self._missing(answer.body, is_overlapping=len(pauses) < len(told))
        self._remember(pauses)
        return News(pauses, notes)

    def _ask(self, client: Client) -> Answer:
        parameters = {**self._wanted, "limit": MOST}
        if self._newest_s is not None:
            own = time_of(self._wanted.get("since")) or 0.0
            parameters["since"] = time_text(max(own, self._newest_s - LATE_S))
        return _answer(client, parameters)

    def _jump_s(self, answer: Answer) -> float:
        """How far the sidecar's clock was set since the last answer, about; 0 where it was not."""
        if answer.date_s is None:
            return 0.0
        ahead_s = answer.date_s - _elapsed_s()
        before_s, self._ahead_s = self._ahead_s, ahead_s
        jump_s = 0.0 if before_s is None else ahead_s - before_s
        return jump_s if abs(jump_s) > JUMP_S else 0.0

    def _exact_s(self, told: list[dict[str, Any]], about_s: float) -> float:
        """The same by the pauses that we know, which are told at other times now; `about_s` where none is told."""
        moved = [
            begun_s - known[0]
            for pause in told
            if len(known := self._known.get(_key(pause), [])) == 1
            and (begun_s := time_of(pause.get("started_at"))) is not None
        ]
        if self._known and not moved:
            return 0.0  # what we know has made room for others: nothing says that it moved
        return statistics.median(moved) if moved else about_s

    def _shift(self, jump_s: float) -> None:
        self._known = {key: [each + jump_s for each in begun] for key, begun in self._known.items()}
        if self._newest_s is not None:
            self._newest_s += jump_s
        self._complete_since = _moved(self._complete_since, jump_s)
        self._wanted["since"] = _moved(self._wanted.get("since"), jump_s)

    def _unknown(self, told: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        # Each one that is known explains one that is told: two may be of the same length.
        unmatched = {key: list(begun) for key, begun in self._known.items()}
        for pause in told:
            begun_s = time_of(pause.get("started_at")) or 0.0
            candidates = unmatched.get(_key(pause), [])
            nearest = min(candidates, key=lambda each: abs(each - begun_s), default=None)
            if nearest is not None and abs(nearest - begun_s) <= SAME_S:
                candidates.remove(nearest)
            else:
                yield pause

    def _remember(self, pauses: list[dict[str, Any]]) -> None:
        ends = [end for end in map(end_of, pauses) if end is not None]
        if self._newest_s is not None:
            ends.append(self._newest_s)
        self._newest_s = max(ends, default=None)
        for pause in pauses:
            begun_s = time_of(pause.get("started_at"))
            if begun_s is not None:
                self._known.setdefault(_key(pause), []).append(begun_s)
        if self._newest_s is not None:
            # What ended before will not be asked for again.
            oldest_s = self._newest_s - LATE_S - SAME_S
            for key, begun in list(self._known.items()):
                kept = [each for each in begun if each + key[0] >= oldest_s]
                if kept:
                    self._known[key] = kept
                else:
                    del self._known[key]

    def _missing(self, document: dict[str, Any], is_overlapping: bool) -> Iterator[str]:
        lost, since = document.get("lost"), document.get("complete_since")
        is_first = self._complete_since is None and self._lost is None
        if isinstance(lost, int):
            # A sidecar that was restarted counts from 0 again.
            before = self._lost if self._lost is not None and self._lost <= lost else 0
            if lost > before:
                yield f"of {lost - before:,} pauses no record came (counters and sums have them)"
            self._lost = lost
        matching = document.get("matching")
        if isinstance(matching, int) and matching > MOST and not (is_first or is_overlapping):
            yield (
                f"{matching - MOST:,} pauses are left out: more came than the sidecar tells at once"
                " (--min-duration or --full asks for fewer)"
            )
        since_s, before_s = time_of(since), time_of(self._complete_since)
        if since_s is not None:
            if (
                before_s is not None
                and since_s > before_s + SAME_S
                and since_s > (self._newest_s or before_s)
            ):
                last = self._complete_since if self._newest_s is None else time_text(self._newest_s)
                yield (
                    f"between {word(last)} and {word(since)} some may be missing: the sidecar was"
                    " restarted and has what the processes still knew, or more came than it keeps"
                )
            self._complete_since = since


def _elapsed_s() -> float:
    """A clock that nobody sets, and that goes on while the machine sleeps, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def _moved(text: str | None, by_s: float) -> str | None:
    when_s = time_of(text)
    return text if when_s is None else time_text(when_s + by_s)


def _key(pause: dict[str, Any]) -> tuple[Any, ...]:
    """What stays the same of a pause; its length comes first."""
    length_s = pause.get("duration_s")
    names = ("dp_rank", "rank", "pid", "gc_generation", "trigger", "collected_objects")
    return (
        length_s if isinstance(length_s, (int, float)) else 0.0,
        *(pause.get(name) for name in names),
    )


def line(pause: dict[str, Any]) -> str:
    """One pause as a line."""
    place = f"dp{word(pause.get('dp_rank'))} rank{word(pause.get('rank'))}"
    return "  ".join(
        (
            word(pause.get("started_at")).ljust(24),
            role(pause).ljust(11),
            place.ljust(10),
            f"pid {word(pause.get('pid'))}".ljust(10),
            f"gen{word(pause.get('gc_generation'))}",
            word(pause.get("trigger")).ljust(8),
            seconds(pause.get("duration_s")).rjust(7),
            f"{count(pause.get('collected_objects'))} collected",
        )
    )


def moment(text: str) -> str:
    """The time that `text` means, as the sidecar takes it: a time with its zone, or how long ago by our clock."""
    try:
        return time_text(time.time() - duration(text))
    except argparse.ArgumentTypeError:
        if time_of(text) is None:
            raise argparse.ArgumentTypeError(
                f"{text!r} is neither a duration like 5m nor a time like 2026-12-01T09:00:00Z"
            ) from None
    return text


def microseconds_of(text: Any) -> int | None:
    """A time of the sidecar in microseconds since 1970; None for what is none."""
    try:
        read = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
        return None if read.tzinfo is None else (read - EPOCH) // timedelta(microseconds=1)
    except (ValueError, OverflowError):
        return None


def time_of(text: Any) -> float | None:
    """The same in seconds."""
    microseconds = microseconds_of(text)
    return None if microseconds is None else microseconds / 1e6


def time_text(when_s: float) -> str:
    """Seconds since 1970 as the sidecar takes them."""
    return f"{datetime.fromtimestamp(when_s, timezone.utc):%Y-%m-%dT%H:%M:%S.%f}Z"


def end_of(pause: dict[str, Any]) -> float | None:
    """When a pause ended, in seconds since 1970."""
    begun_s, length_s = time_of(pause.get("started_at")), pause.get("duration_s")
    if begun_s is None or not isinstance(length_s, (int, float)):
        return begun_s
    return begun_s + length_s


def show_pauses(document: dict[str, Any]) -> str:
    """The pauses for people, newest first."""
    pauses = document.get("pauses") or []
    parts = [pause_table(pauses) if pauses else "no such pause has been recorded"]
    more = (document.get("matching") or 0) - len(pauses)
    if more > 0:
        parts.append(f"{more:,} more match; ?limit= asks for more of them")
    if document.get("complete_since"):
        parts.append(f"complete since {word(document['complete_since'])}")
    if document.get("lost"):
        parts.append(
            f"of {document['lost']:,} others no record came (counters and sums have them all)"
        )
    return "\n\n".join(parts)


def pause_table(pauses: list[dict[str, Any]]) -> str:
    """One line for each pause."""
    lines = [
        [
            word(pause.get("started_at")),
            role(pause),
            word(pause.get("trigger")),
            word(pause.get("dp_rank")),
            word(pause.get("rank")),
            word(pause.get("pid")),
            word(pause.get("gc_generation")),
            seconds(pause.get("duration_s")),
            count(pause.get("collected_objects")),
        ]
        for pause in pauses
    ]
    return table(COLUMNS, lines, left=3)


def _notes(document: dict[str, Any], shown: int) -> Iterator[str]:
    if not shown:
        yield "no such pause has been recorded"
    matching, lost = document.get("matching"), document.get("lost")
    if isinstance(matching, int) and matching > shown:
        yield f"{matching - shown:,} older ones match too; --limit asks for more of them"
    if isinstance(lost, int) and lost:
        yield f"of {lost:,} others no record came (counters and sums have them all)"


def _print(pauses: Sequence[dict[str, Any]], as_json: bool) -> None:
    for pause in pauses:
        print(json.dumps(pause) if as_json else line(pause))
    sys.stdout.flush()


def _wait(wait_s: float) -> None:
    """Sleep, but not when nobody reads any more what we print: then there may be nothing to print for long."""
    try:
        reader = select.poll()
        reader.register(sys.stdout, 0)
    except (OSError, ValueError):  # it is no file
        time.sleep(wait_s)
        return
    if reader.poll(1000 * wait_s):
        raise BrokenPipeError


def _limit(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= number <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST:,}")
    return number
