"""Modules that ``apply_activation_checkpointing`` wraps: FSDP, FSDP2 and plain PyTorch, and Accelerate.

It wraps each module that its ``check_fn`` picks in a ``CheckpointWrapper``, which calls
``torch.utils.checkpoint`` without reentrance; the keys of a ``state_dict`` stay what they were.
Accelerate's FSDP plugin has an option of its own, ``activation_checkpointing``, which is one switch for
every layer that it shards, and with FSDP2 wraps them with ``preserve_rng_state=False``: dropout then draws
another mask in the recompute. So that is off there, and modules are wrapped before ``prepare``, which
leaves them as they are.
Source: ``torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py`` in pytorch/pytorch,
https://docs.pytorch.org/docs/stable/checkpoint.html, ``src/accelerate/utils/dataclasses.py``
(FullyShardedDataParallelPlugin) and ``src/accelerate/utils/fsdp_utils.py`` (fsdp2_apply_ac) in
huggingface/accelerate, and https://huggingface.co/docs/accelerate/usage_guides/fsdp.
"""

from planner.exporters._whole_modules import WholeModules


class _Accelerate(WholeModules):
    name = "accelerate"


class _FSDP(WholeModules):
    name = "fsdp"


EXPORTER = (_Accelerate(), _FSDP())
