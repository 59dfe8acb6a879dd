"""The allocator before torch's: what it records, where it places, and that no tensor ever shares its memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from planner.capture import arena_internals
from planner.capture.arena_internals import BACKWARD, FORWARD, Memory, Table, leave
from planner.capture.memory import measure_peak
from planner.errors import RuntimeUnsupportedError

pytestmark = pytest.mark.skipif(arena_internals.missing() is not None, reason="needs a C++ compiler, and Linux")

KIB = 1024


@pytest.fixture(autouse=True)
def _left() -> Iterator[None]:
    yield
    leave()


def bytes_of(*sizes: int) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]


def recorded(run: Callable[[], object], part: int = FORWARD) -> Table:
    table = Table()
    table.enter(part)
    run()
    leave()
    return table


def test_it_records_sizes_and_when_each_is_freed() -> None:
    def run() -> None:
        (first,) = bytes_of(100)
        second, third = bytes_of(200, 300)
        del first, third
        bytes_of(400)
        del second

    assert recorded(run).recorded() == [(100, 3), (200, 4), (300, 3), (400, 4)]


def test_what_is_kept_is_never_freed_in_the_record() -> None:
    kept: list[torch.Tensor] = []
    assert recorded(lambda: kept.extend(bytes_of(100))).recorded() == [(100, -1)]


def test_it_places_what_is_of_the_recorded_size() -> None:
    memory = Memory(KIB)
    table = recorded(lambda: bytes_of(100, 200, 300)).placed([64, 256, -1], memory)
    table.enter(FORWARD)
    first, second, third = bytes_of(100, 200, 300)
    assert second.data_ptr() - first.data_ptr() == 256 - 64
    assert not 0 <= third.data_ptr() - first.data_ptr() < KIB
    assert table.counts() == (2, 0)
    assert table.counts() == (0, 0)


def test_other_sizes_and_more_of_them_come_from_elsewhere() -> None:
    table = recorded(lambda: bytes_of(100, 200)).placed([0, 128], Memory(KIB))
    table.enter(FORWARD)
    first, second, third = bytes_of(100, 201, 7)
    assert table.counts() == (1, 2)
    assert len({each.data_ptr() for each in (first, second, third)}) == 3


@pytest.mark.parametrize("offset", [0, 64, 128])
def test_a_place_of_which_any_byte_is_held_is_not_given(offset: int) -> None:
    table = recorded(lambda: [bytes_of(200), bytes_of(128)]).placed([64, offset], Memory(KIB))
    table.enter(FORWARD)
    (held,), (other,) = bytes_of(200), bytes_of(128)
    assert table.counts() == (1, 1)
    leave()
    held.fill_(7)
    other.fill_(9)
    assert (held == 7).all()
    del held, other
    table.enter(FORWARD)
    bytes_of(200)
    bytes_of(128)
    assert table.counts() == (2, 0)


def test_a_backward_goes_on_where_it_began() -> None:
    table = Table()
    table.enter(FORWARD)
    bytes_of(100)
    table.enter(BACKWARD)
    bytes_of(200)
    leave()
    placed = table.placed([0, 128], Memory(KIB))
    placed.enter(FORWARD)
    placed.enter(BACKWARD)  # what came between is missing
    (only,) = bytes_of(200)
    assert placed.counts() == (1, 0)
    placed.enter(FORWARD)
    (first,) = bytes_of(100)
    assert only.data_ptr() - first.data_ptr() == 128


def test_tensors_outlive_the_arena_in_which_they_lie() -> None:
    table = recorded(lambda: bytes_of(100)).placed([0], Memory(KIB))
    table.enter(FORWARD)
    (kept,) = bytes_of(100)
    leave()
    kept.fill_(5)
    del table
    gc.collect()
    assert (kept == 5).all()


def test_other_threads_have_torchs_own_memory() -> None:
    table = recorded(lambda: bytes_of(100)).placed([0], Memory(KIB))
    table.enter(FORWARD)
    thread = threading.Thread(target=lambda: bytes_of(100))
    thread.start()
    thread.join()
    assert table.counts() == (0, 0)
    bytes_of(100)
    assert table.counts() == (1, 0)


def test_what_another_thread_frees_is_free() -> None:
    table = recorded(lambda: bytes_of(100)).placed([0], Memory(KIB))
    for _ in range(2):
        table.enter(FORWARD)
        kept = bytes_of(100)
        thread = threading.Thread(target=kept.clear)
        thread.start()
        thread.join()
    assert table.counts() == (2, 0)


def test_a_peak_is_measured_as_without_an_arena() -> None:
    def run() -> None:
        first, _second = bytes_of(1000, 2000)
        del first
        bytes_of(3000)

    table = recorded(run)
    placed = table.placed([0, 4096, 8192], Memory(16 * KIB))
    placed.enter(FORWARD)
    assert measure_peak(run, torch.device("cpu"))[0] == 5000
    assert placed.counts() == (3, 0)


def test_storages_may_grow_and_be_shared() -> None:
    table = recorded(lambda: bytes_of(100)).placed([0], Memory(KIB))
    table.enter(FORWARD)
    (grown,) = bytes_of(100)
    leave()
    grown.fill_(3)
    grown.resize_(5000)
    assert (grown[:100] == 3).all()
    table.enter(FORWARD)
    (shared,) = bytes_of(100)
    leave()
    shared.fill_(4).share_memory_()
    assert shared.is_shared() and (shared == 4).all()


def test_more_memory_than_there_is_raises() -> None:
    with pytest.raises(MemoryError, match="more than the system gives"):
        Memory(2**60)


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeUnsupportedError, match="false did not compile"):
        arena_internals._built()


def test_where_there_is_none_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert "C++ compiler" in (arena_internals.missing() or "")
