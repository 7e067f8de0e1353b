"""Tasks that go on by themselves, held until they end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_held: set[asyncio.Task[Any]] = set()


def spawn(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that is held on to: asyncio itself keeps weak references only."""
    task = asyncio.create_task(work)
    _held.add(task)
    task.add_done_callback(_held.discard)
    return task
