"""Find the saved activations of a recorded step that could be offloaded to the host, and when.

A module sends what it saves for backward, or what its checkpoint is given, where nobody outside its call saves that or
is given it: then a value has one place on the host, leaves once and returns once, whatever else is chosen. It leaves
when the call has ended and the program has let go of it, and returns when the backward first reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.capture.eager.trace import Call, Save, Trace
from planner.ir.checkpoints import Sent
from planner.ir.layers import is_within


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A call that can be checkpointed: its runs up to before ``stop`` are run again.

    That happens before run ``before`` of the backward; until run ``until`` something of it is saved. They make the
    storages ``makes``, and find ``finds`` there. ``keepable`` are those that need not run, if their outputs are kept.
    Where the backward reads nothing that the call saves, nothing runs again: ``unread`` is what is then not held.
    """

    module: str
    call: Call
    stop: int
    before: int
    until: int
    makes: frozenset[int]
    finds: frozenset[int]
    statistics_bytes: int
    keepable: tuple[int, ...]
    unread: tuple[int, ...] = ()


@dataclass(frozen=True)
class Waits:
    """What one call could send, of what it saves or its checkpoint is given; here ``leaves`` and so on count runs."""

    saved: tuple[Sent, ...]
    given: tuple[Sent, ...]


def waits_of(trace: Trace, candidates: Sequence[Candidate], movable: Collection[int]) -> dict[str, Waits]:
    """Say for each candidate what it could send of the storages that are large enough, and may go."""
    search = _SendSearch(trace, candidates, movable)
    return {c.module: Waits(tuple(search.saved(c)), tuple(search.given(c))) for c in candidates if not c.unread}


class _SendSearch:
    def __init__(self, trace: Trace, candidates: Sequence[Candidate], movable: Collection[int]) -> None:
        self.trace = trace
        self.saves: defaultdict[int, list[Save]] = defaultdict(list)
        self.written: dict[int, int] = {}
        self.used: dict[int, int] = {}
        """For each storage, the run before which the program is through with it."""
        self.users: defaultdict[int, list[Candidate]] = defaultdict(list)
        """For each storage, the candidates that find it there: they may need it when they run again."""
        self.makers: defaultdict[int, list[Candidate]] = defaultdict(list)
        for save in trace.saves:
            if save.storage is not None:
                self.saves[save.storage].append(save)
        for position, run in enumerate(trace.runs):
            self.written.update(dict.fromkeys(run.writes, position))
            self.used.update(dict.fromkeys(run.reads, position + 1))
        for candidate in candidates:
            for value in candidate.makes:
                self.makers[value].append(candidate)
            for value in candidate.finds:
                self.users[value].append(candidate)
        self.movable = {
            value
            for value in movable
            if (storage := trace.storages[value]).maker < trace.backward
            and storage.died is not None
            and not storage.is_number
        }

    def saved(self, candidate: Candidate) -> Iterator[Sent]:
        numbers = _numbers([save.storage for save in candidate.call.saves])
        for value in sorted(numbers.keys() & self.movable):
            saves = self.saves[value]
            reads = [save.read for save in saves if save.read is not None and save.is_plain]
            if len(reads) < len(saves) or not self._is_its_own(value, candidate, min(s.saved for s in saves)):
                continue
            yield from self._wait(value, numbers[value], candidate, min(reads))

    def given(self, candidate: Candidate) -> Iterator[Sent]:
        call = candidate.call
        numbers = _numbers(call.direct)
        for value in sorted((numbers.keys() & self.movable) - call.enclosed):
            if self._is_its_own(value, candidate, call.begin):
                yield from self._wait(value, numbers[value], candidate, candidate.before)

    def _wait(self, value: int, numbers: tuple[int, ...], candidate: Candidate, returns: int) -> Iterator[Sent]:
        died = self.trace.storages[value].died
        assert died is not None
        leaves = max(died, self.used.get(value, 0), candidate.call.end)
        if leaves <= self.trace.backward and leaves < returns:
            yield Sent(value=value, numbers=numbers, leaves=leaves, returns=returns)

    def _is_its_own(self, value: int, candidate: Candidate, since: int) -> bool:
        """Whether nobody outside a call saves a value, or needs it to run again, and nobody writes into it later."""
        saves = self.saves[value]
        inside = {id(save) for save in candidate.call.saves}
        until = max((save.released or len(self.trace.runs) for save in saves), default=0)
        return (
            self.written.get(value, -1) < since
            and all(id(save) in inside for save in saves)
            and all(_are_nested(user.module, candidate.module) for user in self.users[value])
            and all(m.before >= until or _are_nested(m.module, candidate.module) for m in self.makers[value])
        )


def _numbers(storages: Sequence[int | None]) -> Mapping[int, tuple[int, ...]]:
    numbers: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
    for number, storage in enumerate(storages):
        if storage is not None:
            numbers[storage] += (number,)
    return numbers


def _are_nested(a: str, b: str) -> bool:
    """Whether one module is the other, or in it."""
    return is_within(a, b) or is_within(b, a)
