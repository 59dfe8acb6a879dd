"""What established systems recompute or move to the host: one row each, with where its rule is written down.

What ``torch.utils.checkpoint`` is used for: whole blocks run again.

Without reentrant autograd (``use_reentrant=False``, as PyTorch advises) a region runs again at the first need
of anything in it, up to the last thing that is needed.

``save_on_cpu`` sends whatever autograd saves to the host, of any size, and fetches it where the backward reads it, on
the stream that computes: copies are waited for. What several operations save is copied for each of them there, once
here. Around a checkpoint (``offload_wrapper``) it sends what the checkpoint saves, its inputs.

Sources: ``torch/utils/checkpoint.py`` of PyTorch 2.13 (``checkpoint``, ``checkpoint_sequential``);
``save_on_cpu`` in ``torch/autograd/graph.py`` and ``offload_wrapper`` in
``torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py`` of the same;
``gradient_checkpointing_enable(every_n_layers=N)`` of huggingface/transformers (pull request 48200);
Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, for segments of about the square root.

Selective checkpointing: every block runs again but what a list of operators keeps.

Whatever of a block is not kept runs again at once, at the block's first need in the backward, not at its own.

Sources: ``create_selective_checkpoint_contexts`` in ``torch/utils/checkpoint.py`` of PyTorch 2.13, with the list
that its users give, products and attention; ``torchtitan/distributed/activation_checkpoint.py`` in
pytorch/torchtitan, whose policy keeps attention and of the products of linear layers every second one only.

Chen's segmentation of the forward, wherever it is narrow, whether or not the model has blocks.

Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016.

Megatron-Core's recomputation of whole layers.

``--recompute-granularity full`` with ``--recompute-method uniform`` runs groups of ``--recompute-num-layers``
layers again, with ``block`` the first so many of each pipeline stage, each by itself; here there is one stage.
Layers enter autograd anew (``tensor_parallel.checkpoint``), so each runs again to its end.

Sources: ``megatron/core/transformer/transformer_config.py`` (``recompute_modules``) and
``megatron/core/tensor_parallel/random.py`` in NVIDIA/Megatron-LM; Megatron Core's developer guide, 0.20.

DeepSpeed's checkpoints of every block: their inputs wait on the host.

Autograd is entered anew for each block, so all of a block runs again. ``cpu_checkpointing`` copies the block's inputs
to the host before the block runs, and back before it runs again, on the stream that computes: the copies out hold
computing up, which is not counted here as far as they would hide behind the block; those back are waited for.
Sources: ``deepspeed/runtime/activation_checkpointing/checkpointing.py`` (``CheckpointFunction``) in
deepspeedai/DeepSpeed; the section on activation checkpointing of DeepSpeed's configuration.

Unsloth's checkpoints: every layer runs again, and its input waits on the host.

Inputs of up to 2 MiB (in 16 bits) stay, and so does that of the last layer, which is needed again at once. The copy
out runs beside the layer, on a stream of its own; the layer ends when it does. The copy back goes to one of two
buffers in turn, so it runs while the backward of the layer after it does. Those two buffers stay allocated through
the forward too; here they are there while something is in them.

Source: ``UnslothCheckpointFunction`` in ``unsloth_zoo/gradient_checkpointing.py`` of unslothai/unsloth-zoo (0373fcc).
"""

from __future__ import annotations

from planner.strategies import Strategy
from planner.strategies import _rules as rules

# fmt: off
STRATEGIES = (
    Strategy("pytorch-checkpoint", "torch.utils.checkpoint around every block", rules.checkpoint()),
    Strategy("every", "torch.utils.checkpoint around every N-th block, from the first on",
             rules.checkpoint(lambda blocks, number: blocks[::number]), lambda blocks: 2),
    Strategy("chunked", "every N-th boundary between blocks is kept, the N blocks between are recomputed together",
             rules.checkpoint(rules.in_groups), rules.square_root),
    Strategy("checkpoint-sequential",
             "torch.utils.checkpoint.checkpoint_sequential: N segments, the last one not checkpointed",
             rules.sequential, rules.square_root),
    Strategy("save-on-cpu", "torch.autograd.graph.save_on_cpu around the forward: all saved activations are offloaded",
             rules.save_on_cpu),
    Strategy("offloaded-checkpoint",
             "torch.utils.checkpoint around every block, its inputs offloaded (offload_wrapper)",
             lambda step, _: rules.inputs_offloaded(step, step.regions(step.blocks))),
    Strategy("selective", "torch's selective checkpointing of every block: products and attention are kept",
             rules.checkpoint(saved=rules.is_product_or_attention)),
    Strategy("torchtitan-selective", "torchtitan's: attention and every second product of a block are kept",
             rules.every_second_product),
    Strategy("sqrt",
             "segments of the forward, about as many as the square root of the places to cut (Chen et al. 2016)",
             rules.square_root_segments),
    Strategy("megatron-uniform", "Megatron-Core, full and uniform: all blocks, N at a time",
             rules.checkpoint(rules.in_groups, whole=True), lambda blocks: 2),
    Strategy("megatron-block", "Megatron-Core, full and block: each of the first N blocks",
             rules.checkpoint(lambda blocks, number: blocks[:number], whole=True), lambda blocks: max(1, blocks // 2)),
    Strategy("deepspeed-cpu-checkpointing",
             "DeepSpeed: every block is recomputed, its inputs are offloaded (cpu_checkpointing)",
             lambda step, _: rules.inputs_offloaded(step, step.regions(step.blocks, whole=True))),
    Strategy("unsloth",
             "Unsloth: every layer is recomputed, its input is offloaded if large, except the last one's",
             rules.unsloth),
)
# fmt: on
