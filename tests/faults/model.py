"""A stateful property test: random operations, crashes, lease ends and restarts, against the model of the design.

The sidecar is the real app, asked without a socket in between; the engine is real agents in tiny processes, with
and without RPC (`tiny_engine`); the model is `design_model`. `python -m tests.faults.model --steps N` runs it for
as long as you like, and prints the seed with which to run the same again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import secrets
import shutil
import time
import warnings
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gc_sidecar_agent.board import Board, read_board
from tests.faults.controlled_time import SIDECAR_MODULES, SIDECAR_MODULES_THAT_DATE
from tests.faults.design_model import MEDDLED, Answer, Ask, Disagreement, Model, Wanted, wanted_in
from tests.faults.tiny_engine import PLACES, Found, Nursery, Place, TinyEngine, nursery
from tests.faults.tiny_sidecar import POLICY_PATH, Mistakes, Sidecar, kill, start_sidecar

T = TypeVar("T")

STEPS_OF_ONE_ENGINE = 50
AGREE_WITHIN_S = 20.0
LIMIT_BYTES = 64 << 20
# No lease is left to end by itself, by the real time that a step takes on a loaded machine.
LEAST_LEFT_S = 30.0
PATHS = {kind: f"/gc/{kind}" for kind in ("freeze", "restore", "maintain", "lease")} | {
    "budget": POLICY_PATH
}
STANDSTILL_DEADLINE_S = 0.3

OWNERS = st.sampled_from(("anonymous", "bench-1", "bench-2"))
MOSTLY_NOT = st.sampled_from((False, False, False, True))
LEASES = st.sampled_from((None, 300.0, 900.0, 5000.0))
POLICY_ASKS = st.builds(
    Ask,
    kind=st.sampled_from(("freeze", "freeze", "budget")),
    owner=OWNERS,
    force=MOSTLY_NOT,
    allow_partial=MOSTLY_NOT,
    lease_s=LEASES,
    interval_s=st.sampled_from((60.0, 60.0, 7200.0)),
    max_rss_growth_bytes=st.sampled_from((LIMIT_BYTES, None)),
    collect_first=st.booleans(),
)
OTHERS = st.builds(
    Ask,
    kind=st.sampled_from(("restore", "maintain", "lease")),
    owner=OWNERS,
    force=st.booleans(),
    allow_partial=MOSTLY_NOT,
    lease_s=LEASES,
)
SOME_PLACE = st.sampled_from(PLACES)


class World:
    """What all machines of one run share, and what they count."""

    def __init__(self, made: Nursery) -> None:
        self.nursery = made
        self.engines = 0
        self.steps: dict[str, int] = {}
        self.disagreement: Disagreement | None = None
        self.mistakes = Mistakes()

    def count(self, step: str) -> None:
        """One more step."""
        self.steps[step] = self.steps.get(step, 0) + 1

    @property
    def total(self) -> int:
        """How many steps have been made."""
        return sum(self.steps.values())


class Machine(RuleBasedStateMachine):
    """One engine with its run directory, and the sidecars that come and go beside it."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.world.engines += 1
        self.loop = asyncio.new_event_loop()
        self.threads = ThreadPoolExecutor(4)
        self.loop.set_default_executor(self.threads)
        self.time = self.world.nursery.time
        self.run_dir = self.world.nursery.directory / f"run-{self.world.engines}"
        self.run_dir.mkdir()
        self.sidecar: Sidecar | None = None
        self.history: list[str] = []

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Let the event loop run until `work` is done."""
        return self.loop.run_until_complete(asyncio.wait_for(work, 60.0))

    def note(self, step: str, what: object = "") -> None:
        """Count a step and tell of it, should it come to a disagreement."""
        self.world.count(step)
        if self.sidecar is not None:
            step = f"{step} (at {self.model.wanted.mode} {self.model.wanted.generation})"
        self.history.append(f"{step} {what}".strip())

    @initialize(
        thresholds=st.sampled_from(((700, 10, 10), (2000, 5, 3))),
        frozen=st.booleans(),
        has_rpc=st.booleans(),
    )
    def begin(self, thresholds: tuple[int, int, int], frozen: bool, has_rpc: bool) -> None:
        found = Found(thresholds, frozen)
        self.note("begin", f"{found} {'with' if has_rpc else 'without'} RPC")
        self.model = Model(found)
        self.engine = TinyEngine(self.world.nursery, self.run_dir, found, has_rpc)
        for place in PLACES:
            self.do(self.engine.start(place))
        self.start_sidecar()
        self.agree()

    # --- what somebody asks for ---

    @precondition(lambda self: self.sidecar)
    @rule(ask=POLICY_ASKS, by_policy=st.booleans(), again=MOSTLY_NOT)
    def enter(self, ask: Ask, by_policy: bool, again: bool) -> None:
        self.ask(ask, again, {"mode": ask.kind} if by_policy else None)

    @precondition(lambda self: self.sidecar)
    @rule(ask=OTHERS, again=MOSTLY_NOT)
    def restore_maintain_or_renew(self, ask: Ask, again: bool) -> None:
        self.ask(ask, again)

    @precondition(lambda self: self.sidecar)
    @rule(kind=st.sampled_from(("restore", "maintain", "lease")), lease_s=LEASES)
    def its_owner_asks(self, kind: str, lease_s: float | None) -> None:
        self.ask(Ask(kind, self.model.wanted.owner or "anonymous", lease_s=lease_s))

    @precondition(lambda self: self.sidecar and self.model.alive)
    @rule(ask=POLICY_ASKS)
    def two_ask_at_once(self, ask: Ask) -> None:
        assert self.sidecar is not None
        asks = [Ask(**{**vars(ask), "force": True}), Ask("maintain", ask.owner, force=True)]
        self.note("two_ask_at_once", ask)
        began = self.time.time()
        changes = [self.sidecar.change(PATHS[each.kind], each.fields()) for each in asks]
        answers = self.do(_all(changes))
        refused = [answer.code == "operation_running" for answer in answers]
        if all(refused):
            raise self.disagreement("both were refused because of the other")
        for each, answer, was_refused in zip(asks, answers, refused, strict=True):
            if not was_refused:
                # The other one's answer may have come in the middle of this one.
                shown = wanted_in(self.do(self.sidecar.status()))
                self.take(each, Answer(answer.status, answer.code, shown), began)
        self.agree()

    def ask(self, ask: Ask, again: bool = False, policy: dict[str, str] | None = None) -> None:
        """Ask for a change, perhaps as a `policy`, and hold what comes of it against the model; perhaps send it a
        second time."""
        assert self.sidecar is not None
        self.note(ask.kind, ask)
        for place in self.model.alive:
            if ask.kind in ("maintain", "restore") and place not in self.model.cycles:
                self.do(self.engine.processes[place].ask("plant"))
                self.model.cycles.add(place)
        fields = {**ask.fields(), **(policy or {}), "operation_id": f"op-{secrets.token_hex(4)}"}
        path = POLICY_PATH if policy else PATHS[ask.kind]
        began = self.time.time()
        answer = self.do(self.sidecar.change(path, fields))
        self.take(ask, answer, began)
        if again and answer.status != 409:
            retried = self.do(self.sidecar.change(path, fields))
            if (retried.status, retried.code) != (answer.status, answer.code):
                raise self.disagreement(f"first {answer}, and when sent again {retried}")
        self.agree()

    def take(self, ask: Ask, answer: Answer, began: float) -> None:
        """Let the model know an answer."""
        try:
            self.model.take(ask, answer, began, self.time.time())
        except Disagreement as disagreement:
            raise self.disagreement(str(disagreement)) from None

    # --- what happens to processes ---

    @rule(
        place=SOME_PLACE,
        how=st.sampled_from(
            ("kill", "start", "start missing", "start missing", "engine", "engine later")
        ),
    )
    def processes_die_and_start(self, place: Place, how: str) -> None:
        """One is killed, one is started anew, or all that have died are, or the whole engine, perhaps later."""
        missing = [each for each in PLACES if each not in self.model.alive]
        if how == "kill" and place in self.model.alive:
            self.note("kill", place)
            self.kill(place)
        elif how == "start":
            self.note("start", place)
            self.start(place)
        elif how.startswith("engine"):
            self.note("start_engine", how)
            for each in self.model.alive:
                self.kill(each)
            if how == "engine later":
                self.agree()
            for each in PLACES:
                self.start(each)
        elif missing:
            self.note("start_missing")
            for each in missing:
                self.start(each)
        self.agree()

    def kill(self, place: Place) -> None:
        """SIGKILL."""
        self.engine.kill(place)
        self.model.dies(place)

    def start(self, place: Place) -> None:
        """Start a process in this place; the one that is there is killed."""
        if place in self.model.alive:
            self.kill(place)
        self.do(self.engine.start(place))
        self.model.starts(place)

    @rule(place=SOME_PLACE, how=st.sampled_from(("meddle", "grow", "stand still")))
    def a_process_misbehaves(self, place: Place, how: str) -> None:
        """Its thresholds are changed, it grows beyond its limit, or it stands still, where it can."""
        if how == "meddle" and self.model.processes[place].is_alive and self.is_frozen(place):
            self.somebody_changes_thresholds(place)
        elif how == "grow" and self.is_limited(place):
            self.grow(place)
        elif how == "stand still" and self.sidecar is not None and self.model.is_whole:
            self.stand_still(place, "restore" if len(self.history) % 3 == 0 else "freeze")

    def somebody_changes_thresholds(self, place: Place) -> None:
        """Something else in the process sets them."""
        self.note("meddle", place)
        thresholds = [*self.model.found.thresholds[:2], MEDDLED]
        self.do(self.engine.processes[place].ask("meddle", thresholds))
        process = self.model.processes[place]
        process.meddled_at = process.meddled_at or self.time.time()
        self.agree()

    def grow(self, place: Place) -> None:
        """It takes more memory than its policy allows."""
        self.note("grow", place)
        process = self.engine.processes[place]
        self.do(process.ask("grow", LIMIT_BYTES + (16 << 20)))
        self.model.leaves(place)
        self.agree()
        self.do(process.ask("shrink"))

    def has_policy(self, place: Place) -> bool:
        """Whether a process lives and is under a policy."""
        process = self.model.processes[place]
        return process.is_alive and process.policy.is_on

    def is_frozen(self, place: Place) -> bool:
        """Whether it is under `freeze`."""
        return self.model.processes[place].policy.mode == "freeze"

    def is_limited(self, place: Place) -> bool:
        """Whether it leaves its policy when it grows."""
        policy = self.model.processes[place].policy
        return self.has_policy(place) and policy.max_rss_growth_bytes is not None

    def stand_still(self, place: Place, kind: str) -> None:
        """Nobody can say what it will do; then it goes on, and does what is wanted by then."""
        assert self.sidecar is not None
        self.note("stand_still", f"{place} {kind}")
        ask = Ask(kind, "stand-still", force=True, interval_s=77.0)
        fields = {**ask.fields(), "deadline_s": STANDSTILL_DEADLINE_S}
        before = self.model.wanted
        self.engine.stop(place)
        answer = self.do(self.sidecar.change(PATHS[kind], fields))
        self.engine.go_on(place)
        if (answer.status, answer.code) != (504, "outcome_unknown"):
            raise self.disagreement(f"answered {answer}, not 504 outcome_unknown")
        self.model.is_new(answer.shown.generation)
        if kind == "freeze" and before.is_on:
            back = Wanted(**{**vars(before), "generation": answer.shown.generation})
        else:
            back = Wanted(generation=answer.shown.generation)
        self.model.want(back)
        self.agree()

    # --- what happens to the sidecar, and time ---

    @rule(seconds=st.sampled_from((10.0, 100.0, 400.0, 1000.0, 4000.0)))
    def time_passes(self, seconds: float) -> None:
        ends = [end for process in self.model.processes.values() for end in process.ends()]
        ends += [self.model.wanted.lease_ends]
        ends += [self.model.board.lease_ends] if self.model.board else []
        later = self.time.time() + seconds
        while any(-1.0 < end - later < LEAST_LEFT_S for end in ends):
            later, seconds = later + 10.0, seconds + 10.0
        self.note("time_passes", f"{seconds:.0f} s")
        self.time.pass_s(seconds)
        self.agree()

    @precondition(lambda self: self.sidecar)
    @rule(comes_back=st.booleans())
    def the_sidecar_is_killed(self, comes_back: bool) -> None:
        self.note("kill_sidecar", "and started anew" if comes_back else "")
        self.crash()
        if comes_back:
            self.start_sidecar()
        self.agree()

    @precondition(lambda self: not self.sidecar)
    @rule()
    def a_sidecar_starts(self) -> None:
        self.note("start_sidecar")
        self.start_sidecar()
        self.agree()

    @precondition(lambda self: self.sidecar)
    @rule(
        ask=st.one_of(POLICY_ASKS, OTHERS), after_s=st.sampled_from((0.0, 0.001, 0.004, 0.01, 0.03))
    )
    def the_sidecar_is_killed_in_the_middle(self, ask: Ask, after_s: float) -> None:
        """Whatever it had done by then: who starts next finds out, and says nothing that is not so."""
        assert self.sidecar is not None
        self.note("kill_sidecar_in_the_middle", f"after {after_s:g} s of {ask}")
        before, may = self.model.wanted, {self.model.wanted.mode}
        may |= {"freeze": {"freeze"}, "budget": {"budget"}, "restore": {"off"}}.get(ask.kind, set())
        answering = self.loop.create_task(self.sidecar.change(PATHS[ask.kind], ask.fields()))
        self.do(asyncio.sleep(after_s))
        answering.cancel()
        self.crash()
        self.do(self.until_quiet())
        truth = self.do(self.engine.truth())
        wrong = {str(place) for place, real in truth.items() if real["mode"] not in may | {"off"}}
        if wrong:
            raise self.disagreement(f"{wrong} have what nobody asked for")
        self.model.observe(truth, self.read_board(), self.time.time())
        self.start_sidecar()
        shown = wanted_in(self.status())
        if shown.mode not in may | {"off"} or shown.generation < self.model.highest - 1:
            raise self.disagreement(f"after {before} and {ask} it is {shown}")
        self.agree()

    def crash(self) -> None:
        """The sidecar is killed: nothing of it does anything any more, and the kernel lets go of its claim."""
        assert self.sidecar is not None
        self.loop.run_until_complete(kill(self.sidecar))
        self.threads.shutdown(wait=True)  # what it had handed to the kernel is done
        self.threads = ThreadPoolExecutor(4)
        self.loop.set_default_executor(self.threads)
        self.sidecar = None
        self.model.sidecar_dies()

    def start_sidecar(self) -> None:
        """Another sidecar on the same run directory."""
        self.sidecar = self.do(start_sidecar(self.engine))
        self.model.settle(self.time.time())
        self.model.sidecar_starts(self.time.time())

    async def until_quiet(self) -> None:
        """Until every process has done what it was told by RPC, and has looked at the board."""
        for process in self.engine.processes.values():
            since = (await process.ask("truth"))["polls"]
            while (await process.ask("truth"))["polls"] < since + 12:
                await asyncio.sleep(0.005)

    def read_board(self) -> Board:
        """What stands there."""
        try:
            return read_board(str(self.run_dir))
        except FileNotFoundError:
            return Board()

    # --- agreement ---

    def status(self) -> dict[str, Any]:
        """GET /gc"""
        assert self.sidecar is not None
        return self.do(self.sidecar.status())

    def agree(self) -> None:
        """Sidecar, processes and model come to agree, and it does not take long."""
        deadline = time.monotonic() + AGREE_WITHIN_S
        while (differs := self.differs()) is not None:
            if time.monotonic() > deadline:
                raise self.disagreement(differs)
            self.do(asyncio.sleep(0.003))

    def differs(self) -> str | None:
        """In what they do not agree."""
        now = self.time.time()
        self.model.settle(now)
        differs = self.model.differs_from_truth(self.do(self.engine.truth()), now)
        if differs is None and self.sidecar is not None:
            differs = self.model.differs_from_status(self.status())
            # It may be killed next, and must not be in the middle of writing that then.
            differs = differs or self.model.differs_from_board(self.read_board())
        if self.world.mistakes.found:
            raise self.disagreement(self.world.mistakes.found.pop())
        return differs

    def disagreement(self, what: str) -> Disagreement:
        """A disagreement, and how it came to it."""
        self.history.append(f"generation {self.model.wanted.generation}: {what}")
        steps = "\n".join(f"  {number}. {step}" for number, step in enumerate(self.history, 1))
        board = self.read_board()
        told = f"{what}\nafter\n{steps}\nthe board has {board.policy} {board.lease}\n{self.model}"
        found = Disagreement(told)
        # Hypothesis makes the same steps again, which may come out otherwise: the first one is the one to tell of.
        self.world.disagreement = self.world.disagreement or found
        return found

    def teardown(self) -> None:
        try:
            if hasattr(self, "engine"):
                self.everybody_has_normal_gc_in_the_end()
        finally:
            self.clear_away()

    def everybody_has_normal_gc_in_the_end(self) -> None:
        """By a restore, or because nobody is left to renew a lease."""
        if self.sidecar is not None and len(self.history) % 2:
            self.ask(Ask("restore", force=True))
        else:
            if self.sidecar is not None:
                self.crash()
            self.time.pass_s(10_000.0)
        self.agree()
        for place, real in self.do(self.engine.truth()).items():
            normal = [True, self.model.thresholds_of(place), self.model.found.frozen]
            if [real["is_enabled"], real["thresholds"], real["is_frozen"]] != normal:
                raise self.disagreement(f"{place} is left with {real}")

    def clear_away(self) -> None:
        """Nothing of this engine is left."""
        if self.sidecar is not None:
            self.crash()
        if hasattr(self, "engine"):
            for place in [*self.engine.processes]:
                self.engine.kill(place)
        self.loop.run_until_complete(asyncio.sleep(0))
        self.threads.shutdown()
        self.loop.close()
        shutil.rmtree(self.run_dir)


async def _all(changes: list[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    return list(await asyncio.gather(*changes))


@contextlib.contextmanager
def _world() -> Iterator[World]:
    logger = logging.getLogger("gc_sidecar.server")
    with nursery() as made, made.time.in_force(SIDECAR_MODULES, SIDECAR_MODULES_THAT_DATE):
        world = World(made)
        logger.addHandler(world.mistakes)
        try:
            yield world
        finally:
            logger.removeHandler(world.mistakes)


def run(steps: int, with_seed: int) -> World:
    """At least so many steps, of as many engines as it takes. Raises Disagreement at the first one."""
    number = with_seed
    warnings.simplefilter("ignore", ResourceWarning)
    with _world() as world:
        while world.total < steps:
            machine = type("Machine", (Machine,), {"world": world})
            # The first one of each round is the shortest that there can be.
            engines = max(5, 1 + (steps - world.total) // STEPS_OF_ONE_ENGINE)
            chosen = settings(
                max_examples=engines,
                stateful_step_count=STEPS_OF_ONE_ENGINE,
                deadline=None,
                database=None,
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
            )
            try:
                run_state_machine_as_test(seed(number)(machine), settings=chosen)
            except Exception:
                if world.disagreement is not None:
                    raise world.disagreement from None
                raise
            number += 1
    return world


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    began = time.monotonic()
    world = run(chosen.steps, chosen.seed)
    for step, count in sorted(world.steps.items()):
        print(f"{count:7} {step}")
    took_s = time.monotonic() - began
    print(f"{world.total} steps with {world.engines} engines in {took_s:.0f} s, no disagreement")


if __name__ == "__main__":
    main()
