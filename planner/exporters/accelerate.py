"""Accelerate: modules wrapped before ``prepare``, with the FSDP plugin's own option off.

The plugin's ``activation_checkpointing`` is one switch for every layer that it shards, and with FSDP2 it
wraps them with ``preserve_rng_state=False``: dropout then draws another mask in the recompute. Modules
that are wrapped before are left as they are.
Source: ``src/accelerate/utils/dataclasses.py`` (FullyShardedDataParallelPlugin) and
``src/accelerate/utils/fsdp_utils.py`` (fsdp2_apply_ac) in huggingface/accelerate, and
https://huggingface.co/docs/accelerate/usage_guides/fsdp.
"""

from __future__ import annotations

from planner.exporters._whole_modules import WholeModules


class _Accelerate(WholeModules):
    name = "accelerate"
    template = """\
# Call checkpoint_modules(model) before accelerator.prepare(model). With FSDP, pass **FSDP_OPTIONS to
# FullyShardedDataParallelPlugin: its own switch would checkpoint every layer on top of this.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

FSDP_OPTIONS = {{"activation_checkpointing": False}}

{modules}

def checkpoint_modules(model):
    chosen = {{id(model.get_submodule(name)) for name in MODULES}}
{without_cache}    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)
    return model
"""


EXPORTER = _Accelerate()
