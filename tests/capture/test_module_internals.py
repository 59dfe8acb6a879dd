"""What decides on a module's step beside its code and data."""

from __future__ import annotations

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook

from planner.capture import module_internals as internals
from planner.capture.storages import StorageRecorder


def test_switches_and_sizes_are_those_of_modules_parameters_and_buffers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.BatchNorm1d(2))
    model.append(model[0])
    switches = internals.switches_and_sizes(model)
    assert len(switches) == len([*model.modules(), *model.parameters(), *model.buffers()])
    model[2].eval()
    without_mode = internals.switches_and_sizes(model)
    model[0].bias.requires_grad_(False)
    frozen = internals.switches_and_sizes(model)
    model[0].weight = torch.nn.Parameter(torch.ones(3, 2))
    assert len({switches, without_mode, frozen, internals.switches_and_sizes(model)}) == 4


def test_hooks_on_all_modules_have_numbers_of_their_own() -> None:
    assert internals.hooks_on_all_modules() == ()
    handles = [register_module_forward_hook(lambda *_: None), register_module_full_backward_hook(lambda *_: None)]
    recorder = StorageRecorder()
    with recorder.modules():  # of the planner itself
        first, second = internals.hooks_on_all_modules()
    assert first != second
    for handle in handles:
        handle.remove()
    assert internals.hooks_on_all_modules() == ()
