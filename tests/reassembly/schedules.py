"""Every schedule of crashing finalizers, walked exhaustively and without threads.

A finalizer is a deterministic function of what the data plane answers it. So where it stands is told
by the answers it had so far, and it can be brought there again by giving it the same answers. That
makes finalizers and plane together a graph, which is walked depth first:

    state       what the plane holds + the answers each finalizer had in its present try + failures left
    transition  one call of one finalizer: it works, or fails before, during or after its effect; or one
                of a trainer, if there is one: it claims all rows that it can, then clears them

A finalizer whose try raises a data-plane error, or answers with `cleanup_pending`, tries again from
the start; one that answers without is done. One that makes no call for a while is paused, so every pause
is among the schedules. A state in which all are done, and the trainer has nothing to do, ends a schedule.
A state that is reached in several ways is walked once, and all the schedules that lead through it are counted.

    Two finalizers of 5 calls each and no failure: 10! / (5! · 5!) = 252 schedules, if each always made 5.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rollout_reassembler.contract.errors import DataPlaneError
from rollout_reassembler.contract.messages import FinalizedGroup
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from tests.captures import CANONICAL, STAGING
from tests.reassembly.contents import Contents, whole_plane
from tests.reassembly.crash_plane import CALLS, Where, apply_until, silence

Finalize = Callable[[Any], FinalizedGroup]
"""Finalizes one fixed request over the data plane that it is given."""

MakePlane = Callable[[], MemoryDataPlane]
"""A fresh plane with the group's calls staged, the same each time."""

NOW = 1.0
"""The time by the clock of every plane here, in unix seconds."""

WRITES = (
    "put_samples",
    "clear_samples",
    "reserve_samples",
    "store_samples",
    "announce_samples",
    "release_samples",
    "claim_meta",
)


class Call(NamedTuple):
    """A data-plane call that a finalizer is about to make, and its number among all different calls."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int = -1


class Write(NamedTuple):
    """A call that changed the plane, and how far it came."""

    call: Call
    where: Where


class _Paused(BaseException):
    """Stops a finalizer at its next call; no `except Exception` may swallow it."""

    def __init__(self, call: Call) -> None:
        self.call = call


class _Script:
    """A data plane that gives the answers it was made with, and stops whoever asks for more."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = iter(answers)

    def register_partition(self, *args: Any, **kwargs: Any) -> None:
        """All partitions are there; registering them again changes nothing."""

    def now(self) -> float:
        """Told without asking the plane, as by a client that has heard its clock once."""
        return NOW

    def __getattr__(self, name: str) -> Any:
        assert name in CALLS, f"{name} is not among the calls of a finalizer"

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                answer = next(self._answers)
            except StopIteration:
                raise _Paused(Call(name, args, kwargs)) from None
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


class Place(NamedTuple):
    """Where a finalizer stands: the numbers of the answers in its present try, or of its own last answer."""

    heard: tuple[int, ...] = ()
    done: int | None = None


class State(NamedTuple):
    plane: int
    places: tuple[Place, ...]
    failures_left: int
    claimed: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


class Contained(NamedTuple):
    """All that a plane holds: what can be read of it, and what tells it from another that reads alike."""

    visible: dict[str, Contents]
    hidden: str


@dataclass
class Explored:
    """How many schedules there are, of how many states and different calls; and how they can end."""

    schedules: int = 0
    states: int = 0
    effects: int = 0
    ends: list[End] = field(default_factory=list)


class End(NamedTuple):
    """What a schedule leaves: the plane, the finalizers' answers, and what the trainer has claimed in all."""

    contents: dict[str, Contents]
    answers: list[FinalizedGroup]
    claimed: tuple[str, ...]


class Explorer:
    """All schedules of `finalizers` finalizers of one request, with up to `failures` failing calls.

    `check` sees every content that the plane has in any of them. With a `trainer` rows are claimed and cleared as
    soon as they can be, or any time later.
    """

    def __init__(
        self,
        make_plane: MakePlane,
        finalize: Finalize,
        *,
        finalizers: int = 2,
        failures: int = 0,
        trainer: bool = False,
        check: Callable[[dict[str, Contents]], None] = lambda contents: None,
    ) -> None:
        self._make_plane = make_plane
        self._finalize = finalize
        self._finalizers = finalizers
        self._failures = failures
        self._trainer = trainer
        self._check = check
        self._values: list[Any] = []
        self._numbers: dict[str, int] = {}
        self._writes: dict[int, list[Write]] = {}
        self._outcomes: dict[tuple[int, ...], Any] = {}
        self._calls: dict[bytes, int] = {}
        self._effects: dict[tuple[int, int, str], tuple[int, int]] = {}
        self._schedules: dict[State, int] = {}
        self._ends: set[State] = set()

    def explore(self) -> Explored:
        first = State(self._plane_after([]), (Place(),) * self._finalizers, self._failures)
        schedules = self._count(first, [])
        ends = {(end.plane, end.places, end.claimed) for end in self._ends}
        return Explored(
            schedules,
            len(self._schedules),
            len(self._effects),
            [
                End(self._values[plane].visible, [self._values[place.done or 0] for place in places], claimed)
                for plane, places, claimed in ends
            ],
        )

    def _count(self, state: State, trail: list[str]) -> int:
        """The number of schedules from this state on; `trail` is one way that led here."""
        if state not in self._schedules:
            steps = [*self._steps(state, trail), *self._trainers_step(state, trail)]
            if not steps:
                self._ends.add(state)
            self._schedules[state] = sum(self._count(*step) for step in steps) if steps else 1
        return self._schedules[state]

    def _steps(self, state: State, trail: list[str]) -> Iterator[tuple[State, list[str]]]:
        """Everything that may happen next, with the trail that leads there."""
        for actor, place in enumerate(state.places):
            if place.done is not None:
                continue
            call = self._outcome(place.heard, trail)
            assert isinstance(call, Call), f"{trail}: a try that ends without a call"
            for how in ("works", "before", "during", "after") if state.failures_left else ("works",):
                if how == "during" and call.name not in WRITES:
                    continue
                longer = [*trail, f"{actor}: {call.name} {how}"]
                plane, answer = self._effect(state.plane, call, how)
                places = list(state.places)
                places[actor] = self._place_after((*place.heard, answer), longer)
                failures_left = state.failures_left - (how != "works")
                yield state._replace(plane=plane, places=tuple(places), failures_left=failures_left), longer

    def _trainers_step(self, state: State, trail: list[str]) -> Iterator[tuple[State, list[str]]]:
        if not self._trainer:
            return
        if state.held:
            call = self._numbered(Call("clear_samples", (list(state.held), CANONICAL), {}))
            plane, _ = self._effect(state.plane, call, "works")
            yield state._replace(plane=plane, held=()), [*trail, "trainer: clears"]
            return
        call = self._numbered(Call("claim_meta", (CANONICAL, "trainer", ["input_ids"], 100), {}))
        plane, answer = self._effect(state.plane, call, "works")
        held = tuple(self._values[answer].sample_ids)
        if held:
            again = set(held) & set(state.claimed)
            assert not again, f"{sorted(again)} can be claimed twice, after {trail}"
            claimed = tuple(sorted((*state.claimed, *held)))
            yield state._replace(plane=plane, claimed=claimed, held=held), [*trail, "trainer: claims"]

    def _place_after(self, heard: tuple[int, ...], trail: list[str]) -> Place:
        outcome = self._outcome(heard, trail)
        if isinstance(outcome, Call):
            return Place(heard)
        if isinstance(outcome, DataPlaneError) or outcome.cleanup_pending:
            return Place()
        return Place(done=self._number(replace(outcome, timings={})))

    def _outcome(self, heard: tuple[int, ...], trail: list[str]) -> Call | FinalizedGroup | DataPlaneError:
        """What a finalizer does after these answers: its next call, its own answer, or what it raises."""
        if heard not in self._outcomes:
            try:
                self._outcomes[heard] = self._finalize(_Script([self._values[number] for number in heard]))
            except _Paused as paused:
                self._outcomes[heard] = self._numbered(paused.call)
            except DataPlaneError as error:
                self._outcomes[heard] = error
            except Exception as error:
                raise AssertionError(f"an error that no finalizer may raise, after {trail}") from error
        outcome: Call | FinalizedGroup | DataPlaneError = self._outcomes[heard]
        return outcome

    def _numbered(self, call: Call) -> Call:
        return call._replace(number=self._calls.setdefault(pickle.dumps(call), len(self._calls)))

    def _effect(self, plane: int, call: Call, how: str) -> tuple[int, int]:
        """The numbers of the plane after this call, and of what the call answers."""
        key = (plane, call.number, how)
        if key not in self._effects:
            where: Where = "after" if how == "works" else how  # type: ignore[assignment]
            changes = call.name in WRITES and where != "before"
            after = self._plane_after([*self._writes[plane], Write(call, where)]) if changes else plane
            self._effects[key] = (
                after,
                self._number(self._answer(plane, call) if how == "works" else silence(call.name)),
            )
        return self._effects[key]

    def _answer(self, plane: int, call: Call) -> Any:
        try:
            return getattr(self._rebuilt(self._writes[plane]), call.name)(*call.args, **call.kwargs)
        except DataPlaneError as error:
            return error

    def _rebuilt(self, writes: list[Write]) -> MemoryDataPlane:
        plane = self._make_plane()
        for call, where in writes:
            apply_until(plane, call.name, call.args, call.kwargs, where)
        return plane

    def _plane_after(self, writes: list[Write]) -> int:
        """The number of the content that these writes make of a fresh plane."""
        plane = self._rebuilt(writes)
        contents = Contained(whole_plane(plane), _hidden(plane))
        number = self._number(contents)
        if number not in self._writes:
            self._writes[number] = writes
            self._check(contents.visible)
        return number

    def _number(self, value: Any) -> int:
        """Values that read alike have one number."""
        key = f"{type(value).__name__} {value!r}"
        if key not in self._numbers:
            self._numbers[key] = len(self._values)
            self._values.append(value)
        return self._numbers[key]


def _hidden(plane: MemoryDataPlane) -> str:
    """Numbers, claims, and values that were not announced."""
    rows = {
        (name, key): (row.number, sorted(row.claimed_by), {column: repr(cell) for column, cell in row.stored.items()})
        for name, partition in plane.tables.partitions.items()
        if name != STAGING
        for key, row in partition.rows.items()
    }
    return repr((plane.tables.numbered, rows))


class SteppedPlane:
    """One plane for several threads, each of whose calls waits until it is that thread's turn."""

    def __init__(self, plane: MemoryDataPlane, actors: int) -> None:
        self.plane = plane
        self._may_call = [threading.Semaphore(0) for _ in range(actors)]
        self._has_called = threading.Semaphore(0)
        self._is_waiting = [True] * actors

    def for_actor(self, actor: int) -> Any:
        return _Stepped(self, actor)

    def run(self, finalize: Finalize, schedule: Iterator[int]) -> tuple[list[FinalizedGroup], list[tuple[int, int]]]:
        """Let the threads call in the order that `schedule` picks; returns the answers and the picks.

        A pick is an index into the finalizers that still run: (index, how many there were to pick from).
        """
        actors = len(self._may_call)
        answers: list[Any] = [None] * actors

        def work(actor: int) -> None:
            try:
                answers[actor] = finalize(self.for_actor(actor))
            except BaseException as error:
                answers[actor] = error
            self._is_waiting[actor] = False
            self._has_called.release()

        threads = [threading.Thread(target=work, args=(actor,)) for actor in range(actors)]
        for thread in threads:
            thread.start()
        for _ in threads:
            self._has_called.acquire()
        picks = []
        while running := [actor for actor in range(actors) if self._is_waiting[actor]]:
            pick = next(schedule, 0)
            picks.append((pick, len(running)))
            self._may_call[running[pick]].release()
            self._has_called.acquire()
        for thread in threads:
            thread.join()
        return answers, picks

    def wait_for_turn(self, actor: int) -> None:
        """Report to the scheduler that this actor stands before a call, and wait."""
        self._has_called.release()
        self._may_call[actor].acquire()


class _Stepped:
    def __init__(self, stepped: SteppedPlane, actor: int) -> None:
        self._stepped = stepped
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._stepped.plane, name)
        if name not in CALLS:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            self._stepped.wait_for_turn(self._actor)
            return function(*args, **kwargs)

        return call


def all_thread_schedules(make_plane: MakePlane, finalize: Finalize, actors: int = 2) -> Iterator[Any]:
    """Run every interleaving once on real threads; yields (plane, answers) of each."""
    chosen: list[int] = []
    while True:
        stepped = SteppedPlane(make_plane(), actors)
        answers, picks = stepped.run(finalize, itertools.chain(chosen))
        yield stepped.plane, answers
        while picks and picks[-1][0] + 1 == picks[-1][1]:
            picks.pop()
        if not picks:
            return
        chosen = [pick for pick, _ in picks[:-1]] + [picks[-1][0] + 1]
