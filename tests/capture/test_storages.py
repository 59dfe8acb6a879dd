"""The recorder of storages: what makes each, what frees it, and what is alive at a time."""

from __future__ import annotations

import torch

from planner.capture import fake_mode
from planner.capture.autograd_accumulation import EngineSums
from planner.capture.storages import PeakRecorder, Run, StepRecorder, StorageRecorder


def test_a_storage_is_known_from_its_maker_to_its_end() -> None:
    mode = fake_mode()
    with mode:
        x = torch.empty(8, 8)
        recorder = StepRecorder[Run](mode, EngineSums(torch.device("cpu")), x)
        with recorder:
            y = (x * x).view(64)
            z = y + 1
            del y
            z.mul_(2)
        recorder.finish()
    assert [run.node.target for run in recorder.events] == [
        torch.ops.aten.mul.Tensor,
        torch.ops.aten.add.Tensor,
        torch.ops.aten.mul_.Tensor,
    ]
    assert [(s.size_bytes, s.maker, s.died) for s in recorder.storages] == [(256, 0, 2), (256, 1, None)]
    seen = [(run.reads, run.makes, run.writes) for run in recorder.events]
    assert seen == [((), (0,), ()), ((0,), (1,), ()), ((1,), (), (1,))]
    square = recorder.events[0]
    assert square.moved_bytes == 2 * 256, "an operand that is given twice is read once"


def test_the_peak_is_of_what_is_alive_together() -> None:
    with fake_mode():
        x = torch.empty(100)
        recorder = PeakRecorder(512, x)
        with recorder:
            y = x + 1
            y = y + 1
            with recorder.silent():
                _unseen = torch.empty(1 << 20)
        assert (recorder.live_bytes, recorder.peak_bytes) == (512, 1024)
        recorder.reach(2000)
        assert recorder.peak_bytes == 2512
        del y
    assert recorder.live_bytes == 0


def test_what_was_there_before_has_no_number() -> None:
    with fake_mode():
        x = torch.empty(4)
        recorder = StorageRecorder(x)
        with recorder:
            y = x.view(2, 2)
            z = y.clone()
    assert recorder.number(x) is recorder.number(y) is None and recorder.size_bytes(y) == 0
    assert recorder.number(z) == 0 and recorder.size_bytes(z) == 16
