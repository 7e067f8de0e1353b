"""Every length of time that the server waits or bounds by, in one place.

Tests shorten them; nobody else needs to: what people may want to choose is a field of a request.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """In seconds, but for `rollback_share`, which is a share of a deadline."""

    # How often the run directory is read by itself, and how old a reading may be that is shown.
    sight_poll_s: float = 1.0
    sight_fresh_s: float = 0.1
    # How often those who watch the events are told.
    live_s: float = 1.0
    # A heartbeat that has not changed for this long on our own clock is stale.
    stale_after_s: float = 5.0
    # How long a sidecar that starts waits for the one before it to leave the run directory.
    claim_patience_s: float = 3.0
    # While an operation waits for pages: how often it looks.
    proof_poll_s: float = 0.02
    # A command goes to the board when its RPC has returned, and no later than this after it began.
    board_after_s: float = 2.0
    # How long a process that shows no sign of life may take to show one before an operation gives up on it.
    unseen_grace_s: float = 2.0
    # The part of a deadline that is kept for rolling back, its share at most, and what it gets in any case.
    rollback_reserve_s: float = 5.0
    rollback_share: float = 0.3
    rollback_least_s: float = 1.0
    # For how long a process may begin a maintenance that it finds on the board, whatever the deadline.
    maintain_begin_s: float = 10.0
    # An operation that outlasts its deadline goes on in the background at most this long.
    background_limit_s: float = 600.0
    # Asking an engine which transport it has: one question, and how long until it is asked again.
    question_s: float = 5.0
    first_retry_s: float = 1.0
    last_retry_s: float = 5.0
    # An engine that has started may take so long until its port answers.
    listening_grace_s: float = 10.0
    # Asking processes without a page how they are, over RPC: how long after a failure, doubled each time.
    observe_retry_s: float = 15.0
    # An engine of which no page is seen is asked for its version this often: the only way to see a restart.
    contact_poll_s: float = 10.0
    idle_poll_s: float = 0.25
    # How long the closing of a window waits for each page to tell the last moments.
    window_close_s: float = 2.0
    # How often it is looked whether one was abandoned.
    window_keep_s: float = 2.0
    # How long its opening and closing wait for the engine's own latency metrics, which are an extra.
    engine_metrics_s: float = 1.0
