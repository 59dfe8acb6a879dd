"""Simulated annealing on the recompute set, with exact live bytes after every move: the compiled kernels of ``search``.

A plan is a set of pairs *(slot, operation)*. The first run of operation ``o`` is in slot ``P * o + P - 1``;
what runs again right before it is in that slot, or in one of the ``P - 1`` before. Runs of one slot go in base order,
so every set is a valid schedule, and with more slots for each operation there is another order than that for what runs
again, too: what is large and needed only for something else may come first. The one pair order ``slot * operations +
operation`` (a *key*) is the order of all runs. A run reads the newest copy made before it; a copy dies at its last
read before the next is made. Adding or removing one rerun therefore moves the ends of a few lifetimes, and only the
runs between the old and the new end change their bytes.

Without numba all this runs uncompiled. It stands in one file because numba, when it looks whether
what it kept on disk is still good, sees no changes to functions of other files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

try:
    numba: Any = import_module("numba")
except ImportError:  # the solver says so; uncompiled, all this is still right, and slow
    numba = None

_unsigned: Any = int if numba is None else numba.uintp
"""For loops over many runs: where an index might be negative, numba looks at each, and nothing is done side by side."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
Array = Any  # of numpy, which comes with numba

CHANGES_AT_MOST = 400
"""How many reruns one move may add and remove."""

MADE_AGAIN_AT_MOST = 60
"""How many operations one move may run again at a time."""

_WITHIN = 0.15
"""How often a rerun that moves stays right before the same operation, roughly."""

_COOLING_MOVES = 100
"""Between two temperatures."""

_DESCENT_MOVES = 50
"""Between two looks at whether the budget is kept."""

RUNS, RERUNS, EXCESS, CHANGES, BUDGET, RANDOM, LOWEST, SLOTS = range(8)
"""Places in ``State.whole``: runs, reruns, byte-runs over the budget, changes of this move, budget, random state, first
position that this move has changed, slots of each operation."""
COST, WEIGHT, BEST = range(3)
"""Places in ``State.real``: cost of all reruns, price of the budget over and over, cost of the best set."""


class Tables(NamedTuple):
    """A graph as arrays: inputs, outputs and readers of each operation in compressed sparse rows.

    Values of no size are left out of all rows, retained ones of ``inputs``: they hold nothing.
    """

    input_start: Array
    inputs: Array
    output_start: Array
    outputs: Array
    reader_start: Array
    readers: Array
    size_bytes: Array
    is_retained: Array
    producer: Array
    costs: Array
    workspace_bytes: Array
    state_bytes: Array
    is_recomputable: Array
    droppable: Array


class State(NamedTuple):
    """A recompute set, and the live bytes at each run.

    ``keys``, ``live_bytes`` and ``dying_bytes`` belong to the runs in order; ``slots[o, :count[o]]``
    are the slots at which ``o`` runs, its own first; ``reruns`` holds the keys of all reruns in any
    order, and ``places[o, n]`` says where in it ``slots[o, n]`` is; ``changes`` is the journal of the current move.
    What belongs to runs stands in ``kept_...`` as it was before that: a move that is not taken is undone by a copy.
    """

    keys: Array
    live_bytes: Array
    dying_bytes: Array
    kept_keys: Array
    kept_live_bytes: Array
    kept_dying_bytes: Array
    slots: Array
    places: Array
    count: Array
    reruns: Array
    best: Array
    changes: Array
    queue: Array
    pending: Array
    extended: Array
    whole: Array
    real: Array


_OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}
"""Kernels allocate nothing and divide by nothing that can be 0: so numba need not count references to arrays, nor look
at divisors. That takes a third off the time of a move."""


def _compiled(function: _Function) -> _Function:
    """Compile, and keep the result on disk where that is possible.

    What is called from other kernels alone, and begins with an underscore, cannot be called from Python: code to unpack
    31 arrays for that took a quarter of the time to compile.
    """
    if numba is None:
        return function
    try:
        return numba.njit(cache=True, no_cpython_wrapper=function.__name__[0] == "_", **_OPTIONS)(function)
    except RuntimeError:  # no folder to keep it in
        return numba.njit(no_cpython_wrapper=function.__name__[0] == "_", **_OPTIONS)(function)


@_compiled
def _random(state: State) -> float:
    """Return a number in 0..1 (xorshift)."""
    x = state.whole[RANDOM]
    x ^= (x << 13) & 0x7FFFFFFFFFFFFFFF
    x ^= x >> 7
    x ^= (x << 17) & 0x7FFFFFFFFFFFFFFF
    state.whole[RANDOM] = x
    return float((x >> 11) & 0xFFFFFFFFFFFF) / float(0x1000000000000)


@_compiled
def _find(state: State, key: int) -> int:
    """Return the position of the first run whose key is not smaller."""
    low = int(key // (len(state.count) * state.whole[SLOTS]))
    high = min(low + state.whole[RERUNS] + 1, state.whole[RUNS])
    while low < high:
        middle = (low + high) >> 1
        if state.keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


@_compiled
def _latest(state: State, operation: int, slot: int) -> int:
    """Return the last run of an operation at or before a slot; -1 if none."""
    place = state.count[operation] - 1
    while place >= 0 and state.slots[operation, place] > slot:
        place -= 1
    return int(place)


@_compiled
def _until(state: State, operation: int, place: int) -> int:
    """Return the slot at which the next copy replaces this one."""
    if place + 1 < state.count[operation]:
        return int(state.slots[operation, place + 1])
    return int(len(state.count) * state.whole[SLOTS])


@_compiled
def _death(tables: Tables, state: State, value: int, slot: int, until: int) -> int:
    """Return the key of the last run that reads the copy made at ``slot`` and replaced at ``until``."""
    last = slot * len(state.count) + tables.producer[value]
    for row in range(tables.reader_start[value], tables.reader_start[value + 1]):
        reader = tables.readers[row]
        place = _latest(state, reader, until - 1)
        if place >= 0 and state.slots[reader, place] >= slot:
            last = max(last, state.slots[reader, place] * len(state.count) + reader)
    return int(last)


@_compiled
def _hold(state: State, first: int, last: int, size_bytes: int) -> int:
    """Add live bytes to the runs from ``first`` to ``last``; return the change of the excess over the budget."""
    live, budget, change = state.live_bytes, state.whole[BUDGET], 0
    if last < first:
        return 0
    state.whole[LOWEST] = min(state.whole[LOWEST], first)
    for position in range(_unsigned(first), _unsigned(last + 1)):
        before = live[position]
        live[position] = before + size_bytes
        change += max(before + size_bytes - budget, 0) - max(before - budget, 0)
    state.whole[EXCESS] += change
    return change


@_compiled
def _die(state: State, position: int, size_bytes: int) -> None:
    """Free so many more bytes after the run at a position."""
    state.whole[LOWEST] = min(state.whole[LOWEST], position)
    state.dying_bytes[position] += size_bytes


@_compiled
def _move_end(state: State, before: int, after: int, size_bytes: int) -> int:
    """Move the end of a lifetime from position ``before`` to ``after``; return the change of the excess."""
    _die(state, before, -size_bytes)
    _die(state, after, size_bytes)
    if after > before:
        return _hold(state, before + 1, after, size_bytes)
    return _hold(state, after + 1, before, -size_bytes)


@_compiled
def _lifetimes(tables: Tables, state: State, slot: int, operation: int, position: int, sign: int) -> None:
    """Add (1) or remove (-1) the live bytes of one rerun, which is not among the operation's ``slots``."""
    size, key, count = tables.size_bytes, slot * len(state.count) + operation, len(state.count)
    for row in range(tables.input_start[operation], tables.input_start[operation + 1]):
        value = tables.inputs[row]
        maker = tables.producer[value]
        place = _latest(state, maker, slot)
        died = _death(tables, state, value, state.slots[maker, place], _until(state, maker, place))
        change = -1
        if died < key:
            end = _find(state, died)
            if sign > 0:
                change = max(_move_end(state, end, position, size[value]), 0)
            else:
                _move_end(state, position, end, size[value])
        state.extended[row - tables.input_start[operation]] = change
    place = _latest(state, operation, slot)
    made, until = state.slots[operation, place], _until(state, operation, place)
    for row in range(tables.output_start[operation], tables.output_start[operation + 1]):
        value = tables.outputs[row]
        if tables.is_retained[value] or _death(tables, state, value, made, until) < key:
            _hold(state, position, position, sign * size[value])
            _die(state, position, sign * size[value])
        else:  # the copy before ends at its last read before this run, the new one where that did
            end = _find(state, _death(tables, state, value, made, slot))
            _die(state, end, sign * size[value])
            _hold(state, end + 1, position - 1, -sign * size[value])
    kept = tables.state_bytes[operation]
    if kept:
        last = state.slots[operation, state.count[operation] - 1]
        if state.count[operation] == 1:
            _hold(state, _find(state, state.slots[operation, 0] * count + operation), position, sign * kept)
            _die(state, position, sign * kept)
        elif last < slot:
            end = _find(state, last * count + operation)
            if sign > 0:
                _move_end(state, end, position, kept)
            else:
                _move_end(state, position, end, kept)


@_compiled
def _copy(source: Array, target: Array, first: int, end: int) -> None:
    """Copy a stretch of an array to the same place in another."""
    for position in range(_unsigned(first), _unsigned(end)):
        target[position] = source[position]


@_compiled
def _make_room(values: Array, position: int, count: int) -> None:
    """Shift the entries from a position on up by one."""
    last, one = _unsigned(count), _unsigned(1)
    for step in range(_unsigned(count - position)):
        values[last - step] = values[last - step - one]


@_compiled
def _close_up(values: Array, position: int, count: int) -> None:
    """Shift the entries after a position down by one."""
    one = _unsigned(1)
    for later in range(_unsigned(position), _unsigned(count)):
        values[later] = values[later + one]


@_compiled
def _enlist(state: State, slot: int, operation: int) -> None:
    """Insert a rerun into its operation's slots and into the list of all reruns."""
    slots, places, place = state.slots, state.places, state.count[operation]
    while slots[operation, place - 1] > slot:
        slots[operation, place] = slots[operation, place - 1]
        places[operation, place] = places[operation, place - 1]
        place -= 1
    slots[operation, place], places[operation, place] = slot, state.whole[RERUNS]
    state.reruns[state.whole[RERUNS]] = slot * len(state.count) + operation
    state.count[operation] += 1
    state.whole[RERUNS] += 1


@_compiled
def _strike(state: State, slot: int, operation: int) -> None:
    """Remove a rerun from its operation's slots and from the list of all reruns."""
    slots, places, count = state.slots, state.places, len(state.count)
    first = _latest(state, operation, slot)
    number = places[operation, first]
    for place in range(first, state.count[operation] - 1):
        slots[operation, place] = slots[operation, place + 1]
        places[operation, place] = places[operation, place + 1]
    state.count[operation] -= 1
    state.whole[RERUNS] -= 1
    if number < state.whole[RERUNS]:  # the last of all takes its place
        key = state.reruns[state.whole[RERUNS]]
        state.reruns[number] = key
        places[key % count, _latest(state, key % count, key // count)] = number


@_compiled
def add(tables: Tables, state: State, slot: int, operation: int) -> None:
    """Add a rerun that is not in the set. O(runs + inputs x readers)."""
    keys, live, dying, whole = state.keys, state.live_bytes, state.dying_bytes, state.whole
    key = slot * len(state.count) + operation
    position = _find(state, key)
    before = keys[position - 1] % len(state.count)
    held = live[position - 1] - tables.workspace_bytes[before] - dying[position - 1]
    _make_room(keys, position, whole[RUNS])
    _make_room(live, position, whole[RUNS])
    _make_room(dying, position, whole[RUNS])
    keys[position], live[position], dying[position] = key, held + tables.workspace_bytes[operation], 0
    whole[RUNS] += 1
    whole[LOWEST] = min(whole[LOWEST], position)
    whole[EXCESS] += max(live[position] - whole[BUDGET], 0)
    state.real[COST] += tables.costs[operation]
    _lifetimes(tables, state, slot, operation, position, 1)
    _enlist(state, slot, operation)


@_compiled
def add_all(tables: Tables, state: State, keys: Array) -> None:
    """Add reruns that are not in the set, as far as the arrays have room."""
    count = len(state.count)
    for key in keys:
        operation = int(key % count)
        if state.count[operation] < state.slots.shape[1] and state.whole[RERUNS] < len(state.reruns):
            add(tables, state, int(key // count), operation)


@_compiled
def remove(tables: Tables, state: State, slot: int, operation: int) -> None:
    """Remove a rerun of the set. O(runs + inputs x readers)."""
    live, whole = state.live_bytes, state.whole
    position = _find(state, slot * len(state.count) + operation)
    _strike(state, slot, operation)
    _lifetimes(tables, state, slot, operation, position, -1)
    state.real[COST] -= tables.costs[operation]
    whole[LOWEST] = min(whole[LOWEST], position)
    whole[EXCESS] -= max(live[position] - whole[BUDGET], 0)
    whole[RUNS] -= 1
    _close_up(state.keys, position, whole[RUNS])
    _close_up(live, position, whole[RUNS])
    _close_up(state.dying_bytes, position, whole[RUNS])


@_compiled
def _change(tables: Tables, state: State, slot: int, operation: int) -> bool:
    """Toggle a rerun and log it for undoing; return whether there was room."""
    noted = state.whole[CHANGES]
    there = state.slots[operation, _latest(state, operation, slot)] == slot
    if noted == CHANGES_AT_MOST or slot <= state.slots[operation, 0]:
        return False
    if there:
        remove(tables, state, slot, operation)
    elif state.count[operation] < state.slots.shape[1] and state.whole[RERUNS] < len(state.reruns):
        add(tables, state, slot, operation)
    else:
        return False
    state.changes[noted] = slot * len(state.count) + operation
    state.whole[CHANGES] = noted + 1
    return True


@_compiled
def _drop_useless(tables: Tables, state: State, operation: int, place: int) -> None:
    """Remove a rerun whose outputs are unused, and the reruns that only it read."""
    count, tail = len(state.count), 1 if place > 0 else 0
    state.queue[0] = state.slots[operation, place] * count + operation
    while tail:
        tail -= 1
        slot, operation = state.queue[tail] // count, state.queue[tail] % count
        place = _latest(state, operation, slot)
        if place <= 0 or state.slots[operation, place] != slot:
            continue
        until, useful = _until(state, operation, place), False
        for row in range(tables.output_start[operation], tables.output_start[operation + 1]):
            value = tables.outputs[row]
            if not tables.is_retained[value]:
                useful |= _death(tables, state, value, slot, until) > slot * count + operation
        if not useful and _change(tables, state, slot, operation):
            for row in range(tables.input_start[operation], tables.input_start[operation + 1]):
                maker = tables.producer[tables.inputs[row]]
                place = _latest(state, maker, slot)
                if place > 0 and tail < len(state.queue):
                    state.queue[tail] = state.slots[maker, place] * count + maker
                    tail += 1


@_compiled
def _drop_useless_makers(tables: Tables, state: State, slot: int, operation: int) -> None:
    """Remove the reruns that only a removed rerun read."""
    for row in range(tables.input_start[operation], tables.input_start[operation + 1]):
        maker = tables.producer[tables.inputs[row]]
        _drop_useless(tables, state, maker, _latest(state, maker, slot))


@_compiled
def _undo(tables: Tables, state: State, slot: int, operation: int) -> bool:
    """Remove a rerun and the reruns that only it read."""
    if not _change(tables, state, slot, operation):
        return False
    _drop_useless_makers(tables, state, slot, operation)
    return True


@_compiled
def _rerun(tables: Tables, state: State, slot: int, operation: int) -> bool:
    """Add a rerun, and reruns of its inputs' producers where holding the inputs costs too many bytes."""
    price = state.real[WEIGHT] / state.whole[BUDGET]
    pending, head, tail = state.pending, 0, 1
    pending[0] = operation
    while head < tail:
        operation = pending[head]
        head += 1
        before = _latest(state, operation, slot)
        if state.slots[operation, before] == slot:
            continue
        if not _change(tables, state, slot, operation):
            return head > 1
        first = tables.input_start[operation]
        for row in range(first, tables.input_start[operation + 1]):
            maker, change = tables.producer[tables.inputs[row]], state.extended[row - first]
            if change < 0 or not tables.is_recomputable[maker] or tail >= len(pending):
                continue
            if _random(state) < (0.9 if change * price > tables.costs[maker] else 0.15):
                pending[tail] = maker
                tail += 1
        _drop_useless(tables, state, operation, before)
    return True


@_compiled
def _drop_at(tables: Tables, state: State, position: int) -> bool:
    """Recompute some value before its next read instead of holding it at a position."""
    count, key = len(state.count), state.keys[position]
    for _ in range(40 if len(tables.droppable) else 0):
        value = tables.droppable[int(_random(state) * len(tables.droppable))]
        maker = tables.producer[value]
        place = _latest(state, maker, key // count)
        if place >= 0 and state.slots[maker, place] * count + maker >= key:
            place -= 1
        if place < 0:
            continue
        until, following = _until(state, maker, place), _until(state, maker, place) * count
        for row in range(tables.reader_start[value], tables.reader_start[value + 1]):
            reader = tables.readers[row]
            for other in range(state.count[reader] - 1, -1, -1):
                read = state.slots[reader, other] * count + reader
                if read < key:
                    break
                following = min(following, read)
        if following != key and following < until * count and following // count > state.slots[maker, place]:
            return bool(_rerun(tables, state, following // count, maker))
    return False


@_compiled
def _tight_position(state: State) -> int:
    """Return a random position over the budget; if there is none, the highest of a few."""
    runs, budget = state.whole[RUNS], state.whole[BUDGET]
    start = int(_random(state) * runs)
    if state.whole[EXCESS]:
        for step in range(runs):
            position = start + step if start + step < runs else start + step - runs
            if state.live_bytes[position] > budget:
                return position
    for _ in range(3):
        other = int(_random(state) * runs)
        if state.live_bytes[other] > state.live_bytes[start]:
            start = other
    return start


@_compiled
def _shift(state: State) -> int:
    """Draw by how many slots to move a rerun."""
    kind, slots = _random(state), state.whole[SLOTS]
    if kind < _WITHIN and slots > 1:
        return int((2 * _random(state) - 1) * slots)
    reach = 2 if kind < 0.5 else 12
    return int(slots * int((2 * _random(state) - 1) * (reach + 1)))


@_compiled
def _move(tables: Tables, state: State) -> bool:
    """Apply one random move."""
    count, kind = len(state.count), _random(state)
    if state.whole[RERUNS] == 0 or kind < 0.25:
        return bool(_drop_at(tables, state, _tight_position(state)))
    key = state.reruns[int(_random(state) * state.whole[RERUNS])]
    slot, operation = key // count, key % count
    if kind < 0.45:  # undo
        return bool(_undo(tables, state, slot, operation))
    if kind < 0.7:  # swap
        return bool(_undo(tables, state, slot, operation) and _drop_at(tables, state, _tight_position(state)))
    first = tables.input_start[operation]
    rows = tables.input_start[operation + 1] - first
    if kind > 0.9 and rows:  # make an input again too
        maker = tables.producer[tables.inputs[first + int(_random(state) * rows)]]
        return bool(tables.is_recomputable[maker] and _rerun(tables, state, slot, maker))
    other = slot + _shift(state)
    last = count * state.whole[SLOTS]
    if other <= state.slots[operation, 0] or other >= last or other == slot:
        return False
    if state.slots[operation, _latest(state, operation, other)] == other:
        return False
    if not _change(tables, state, slot, operation):
        return False
    added = _rerun(tables, state, other, operation)
    _drop_useless_makers(tables, state, slot, operation)
    _drop_useless(tables, state, operation, _latest(state, operation, other))
    return bool(added)


@_compiled
def _keep(state: State, first: int) -> None:
    """Take what belongs to runs, from a position on, as what a move that is not taken goes back to."""
    _copy(state.keys, state.kept_keys, first, state.whole[RUNS])
    _copy(state.live_bytes, state.kept_live_bytes, first, state.whole[RUNS])
    _copy(state.dying_bytes, state.kept_dying_bytes, first, state.whole[RUNS])


@_compiled
def _go_back(state: State, runs: int) -> None:
    """Undo the changes of this move, before which there were so many runs."""
    whole, count = state.whole, len(state.count)
    while whole[CHANGES]:
        whole[CHANGES] -= 1
        key = state.changes[whole[CHANGES]]
        slot, operation = key // count, key % count
        if state.slots[operation, _latest(state, operation, slot)] == slot:
            _strike(state, slot, operation)
        else:
            _enlist(state, slot, operation)
    whole[RUNS] = runs
    _copy(state.kept_keys, state.keys, whole[LOWEST], runs)
    _copy(state.kept_live_bytes, state.live_bytes, whole[LOWEST], runs)
    _copy(state.kept_dying_bytes, state.dying_bytes, whole[LOWEST], runs)


@_compiled
def anneal(tables: Tables, state: State, moves: int, temperature: float, pace: float) -> int:
    """Try moves at one temperature, keeping the cheapest set within the budget; give how many were taken."""
    whole, real, taken = state.whole, state.real, 0
    _keep(state, 0)
    for _ in range(moves):
        cost, excess, runs = real[COST], whole[EXCESS], whole[RUNS]
        whole[CHANGES], whole[LOWEST] = 0, runs
        _move(tables, state)
        if whole[CHANGES]:
            worse = real[COST] - cost + real[WEIGHT] * (whole[EXCESS] - excess) / whole[BUDGET]
            if worse <= 0.0 or _random(state) < math.exp(-worse / temperature):
                taken += 1
                _keep(state, whole[LOWEST])
                if whole[EXCESS] == 0 and real[COST] < real[BEST] - 1e-9:
                    real[BEST] = real[COST]
                    state.best[0] = whole[RERUNS]
                    for number in range(whole[RERUNS]):
                        state.best[1 + number] = state.reruns[number]
            else:
                _go_back(state, runs)
                real[COST], whole[EXCESS] = cost, excess
        real[WEIGHT] *= 1.0 - pace if whole[EXCESS] == 0 else 1.0 + pace
        real[WEIGHT] = min(max(real[WEIGHT], 1e-9), 1e12)
    return taken


@_compiled
def cool(tables: Tables, state: State, moves: int, hot: float, cold: float, pace: float) -> None:
    """Anneal from one temperature down to another."""
    for done in range(0, moves, _COOLING_MOVES):
        anneal(tables, state, min(_COOLING_MOVES, moves - done), hot * (cold / hot) ** (done / moves), pace)


@_compiled
def allow(state: State, budget_bytes: int) -> None:
    """Set another budget, within which no set has been come by yet; the best set stays that of the budget before."""
    whole = state.whole
    whole[BUDGET], whole[EXCESS], state.real[BEST] = budget_bytes, 0, math.inf
    for position in range(whole[RUNS]):
        whole[EXCESS] += max(state.live_bytes[position] - budget_bytes, 0)


@_compiled
def descend(
    tables: Tables, state: State, moves: int, temperature: float, pace: float, step: float, least_bytes: int
) -> int:
    """Anneal, and each time that the budget is kept make it smaller by a share of it, down to ``least_bytes``.

    The set of the smallest budget that was kept is the best; give the number of moves until that was found.
    """
    whole, real, found = state.whole, state.real, 0
    for done in range(0, moves, _DESCENT_MOVES):
        # For a constant numba would compile "anneal", and all that it calls, once more.
        anneal(tables, state, min(_DESCENT_MOVES, moves), temperature, pace)
        if real[BEST] == math.inf:
            continue
        found = done + _DESCENT_MOVES
        if whole[BUDGET] <= least_bytes:
            break
        allow(state, max(least_bytes, whole[BUDGET] - 1 - int(step * whole[BUDGET])))
    return found
