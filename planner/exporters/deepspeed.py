"""DeepSpeed: its configuration, and the code that wraps modules in ``deepspeed.checkpointing``.

The JSON says how checkpoints are kept and not where they are, so the modules are wrapped in code. Its
``contiguous_memory_optimization`` is left off: it needs ``partition_activations`` and a
``number_checkpoints``. Its ``checkpoint`` is reentrant and runs all of a module again.
Source: ``deepspeed/runtime/activation_checkpointing/config.py`` and ``checkpointing.py`` in
deepspeedai/DeepSpeed, and https://deepspeed.readthedocs.io/en/latest/activation-checkpointing.html.
"""

from __future__ import annotations

from planner.exporters._whole_modules import WholeModules


class _DeepSpeed(WholeModules):
    name = "deepspeed"
    summary = "whole modules run again, each to its end, where the plan chooses single operations"
    to_the_end = True
    lost = ("a checkpoint of DeepSpeed is reentrant: one of a module's inputs must need a gradient",)
    template = """\
# Merge DEEPSPEED_CONFIG into the configuration, and call checkpoint_modules(model, config) with all of it before
# deepspeed.initialize.
import functools

DEEPSPEED_CONFIG = {{
    "activation_checkpointing": {{
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "number_checkpoints": {count},
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    }},
}}

{modules}

def checkpoint_modules(model, config=None, mpu=None):
    import deepspeed

    deepspeed.checkpointing.configure(mpu, deepspeed_config=config)
{without_cache}    for name in MODULES:
        module = model.get_submodule(name)
        module.forward = functools.partial(_checkpointed, module.forward)
    return model


def _checkpointed(forward, *args, **kwargs):
    import deepspeed
    import torch

    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return deepspeed.checkpointing.checkpoint(forward, *args, **kwargs)
"""


EXPORTER = _DeepSpeed()
