"""FSDP, FSDP2 and plain PyTorch: ``apply_activation_checkpointing`` with a ``check_fn``.

It wraps each module that ``check_fn`` picks in a ``CheckpointWrapper``, which calls
``torch.utils.checkpoint`` without reentrance; the keys of a ``state_dict`` stay what they were.
Source: ``torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py`` in pytorch/pytorch, and
https://docs.pytorch.org/docs/stable/checkpoint.html.
"""

from __future__ import annotations

from planner.exporters._whole_modules import WholeModules


class _FSDP(WholeModules):
    name = "fsdp"
    template = """\
# Call checkpoint_modules(model) before fully_shard (FSDP2), or instead of any sharding. With
# FullyShardedDataParallel (FSDP1): modules = planned_modules(model), shard, then
# checkpoint_modules(model, modules).
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

{modules}

def planned_modules(model):
    return [model.get_submodule(name) for name in MODULES]


def checkpoint_modules(model, modules=None):
    chosen = {{id(module) for module in (planned_modules(model) if modules is None else modules)}}
{without_cache}    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)
    return model
"""


EXPORTER = _FSDP()
