"""What people do about GC pauses: CPython's own GC, and what others have published, each anew in a few lines.

How often each acts is scaled to the length of the run, for a run here lasts seconds.
"""

from __future__ import annotations

import gc

# The published policy ticks each minute; a run stands for ten of them.
TICKS_PER_RUN = 10
# "Each second": a step takes about 5 ms.
STEPS_PER_COLLECT = 200
HELD_OFF = 1 << 30


class Peer:
    """CPython's own GC, as it is.

    `enter` is called before the first step, `after_step` at the end of each, on the thread that steps and inside
    the step: so whatever a peer does holds a step up, as it would under the lock that every thread needs.
    """

    def __init__(self, steps: int) -> None:
        self.freezes = 0
        self._steps = steps
        self._is_asking = False

    def enter(self) -> None:
        """Before the first step."""

    def after_step(self, number: int) -> None:
        """At the end of step `number`, which counts from 1."""

    def leave(self) -> None:
        """After the last step."""

    def was_asked(self) -> bool:
        """Whether the collection that ends now was asked for; called once for each."""
        return self._is_asking

    def freeze(self) -> None:
        gc.freeze()
        self.freezes += 1

    def collect(self) -> None:
        self._is_asking = True
        gc.collect()
        self._is_asking = False

    def is_tick(self, number: int) -> bool:
        return number % max(1, self._steps // TICKS_PER_RUN) == 0


class Disabled(Peer):
    """gc.disable(): no collection at all, and no cyclic garbage is ever reclaimed."""

    def enter(self) -> None:
        gc.disable()


class FrozenAtStart(Peer):
    """vLLM: every generation is collected and the heap is frozen once, at the end of the start-up."""

    def enter(self) -> None:
        for generation in range(3):
            gc.collect(generation)
        self.freeze()


class FrozenOnce(Peer):
    """SGLang's POST /freeze_gc: one freeze, without a collection, when somebody asks for it; here after a third of
    the steps. It lists the objects of each generation before and after, to log how many they are."""

    def after_step(self, number: int) -> None:
        if number == self._steps // 3:
            self._count()
            self.freeze()
            self._count()

    @staticmethod
    def _count() -> tuple[int, ...]:
        return tuple(len(gc.get_objects(generation)) for generation in range(3))


class Published(Peer):
    """The published policy: the third threshold out of reach, and a bare freeze at the start and at each tick."""

    def enter(self) -> None:
        threshold0, threshold1, _ = gc.get_threshold()
        gc.set_threshold(threshold0, threshold1, HELD_OFF)
        self.freeze()

    def after_step(self, number: int) -> None:
        if self.is_tick(number):
            self.tick()

    def tick(self) -> None:
        self.freeze()


class PublishedCollecting(Published):
    """The published policy's first rejected variant, as we read it: each tick collects before it freezes."""

    def tick(self) -> None:
        self.collect()
        self.freeze()


class PublishedCounting(Published):
    """The published policy's second rejected variant, as we read it: each tick asks how many objects are frozen,
    which walks them all. It is no collection, so that only the steps show it."""

    def tick(self) -> None:
        self.freeze()
        gc.get_freeze_count()


class Collecting(Peer):
    """A full collection now and then at a moment of one's own choice, CPython's own ones going on."""

    def after_step(self, number: int) -> None:
        if number % STEPS_PER_COLLECT == 0:
            self.collect()


PEERS: dict[str, type[Peer]] = {
    "off": Peer,
    "gc.disable()": Disabled,
    "vLLM: frozen at start": FrozenAtStart,
    "SGLang: /freeze_gc once": FrozenOnce,
    "published": Published,
    "published, collecting": PublishedCollecting,
    "published, counting": PublishedCounting,
    "gc.collect() each second": Collecting,
}
