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

Megatron-Core's recomputation: whole layers, core attention, or the outputs of cheap operations.

``--recompute-granularity full`` with ``--recompute-method uniform`` runs groups of ``--recompute-num-layers``
layers again, with ``block`` the first so many of each pipeline stage, each by itself; here there is one stage.
``selective`` with ``core_attn`` (the default) runs from the product of queries and keys to that with the values
again. These enter autograd anew (``tensor_parallel.checkpoint``), so a region runs again to its end.

``layernorm`` and ``moe_act`` discard outputs instead (``CheckpointWithoutOutput``): what a layer norm or an
activation function makes is dropped once its reader has run, and made again when the gradient of that reader's
output is there; their inputs are kept. Megatron-Core does so with the activation functions of experts; here it is
done with those of every MLP, with the product by a gate.

Sources: ``megatron/core/transformer/transformer_config.py`` (``recompute_modules``) and
``megatron/core/tensor_parallel/random.py`` in NVIDIA/Megatron-LM; Megatron Core's developer guide, 0.20.

DeepSpeed's checkpoints of every block: their inputs wait on the host.

Autograd is entered anew for each block, so all of a block runs again. ``cpu_checkpointing`` copies the block's inputs
to the host before the block runs, and back before it runs again, on the stream that computes: the copies out hold
computing up, which is not counted here as far as they would hide behind the block; those back are waited for.
Sources: ``deepspeed/runtime/activation_checkpointing/checkpointing.py`` (``CheckpointFunction``) in
deepspeedai/DeepSpeed; the section on activation checkpointing of DeepSpeed's configuration.

JAX's policies, for the whole step as one function: what may not be saved is made again at its first need.

``jax.checkpoint`` without more is ``nothing_saveable``; around the whole step that frees next to nothing, since
all is made again before the backward begins to use it. A fused attention kernel stands for the batched products
that ``jax.nn.dot_product_attention`` is made of. XLA may order and fuse differently.

``offload_dot_with_no_batch_dims`` offloads what ``dots_with_no_batch_dims_saveable`` would keep, and
``save_and_offload_only_these_names`` values that have a name; here those are what enters a block, and nothing else is
kept. XLA copies beside computing: transfers have the time here that there is without another peak.

Sources: ``checkpoint_policies`` in ``jax/_src/ad_checkpoint.py`` of jax-ml/jax (0018095): ``dots_saveable`` means
matrix products and convolutions, ``dots_with_no_batch_dims_saveable`` matrix products without batch dimensions alone;
``jax.checkpoint_policies`` in JAX's reference, and its page on memory spaces and host offloading.

TensorFlow's ``tf.recompute_grad`` around every block: the whole function runs again under a tape of its own.

Source: ``tensorflow/python/ops/custom_gradient.py`` of TensorFlow 2.13, ``recompute_grad``.

OneFlow's flag ``config.activation_checkpointing`` on modules of an ``nn.Graph``: here on every block.

Each flagged module is doubled in the compiled graph, whole, and its backward reads the double; an identity
before it ends the segment. Batch norms are left out: their output stays.

Sources: ``oneflow/core/job_rewriter/checkpointing_pass.cpp`` and ``python/oneflow/nn/graph/graph_block.py`` in
Oneflow-Inc/oneflow (03b7b8a); https://docs.oneflow.org/en/master/cookies/activation_checkpointing.html.

Unsloth's checkpoints: every layer runs again, and its input waits on the host.

Inputs of up to 2 MiB (in 16 bits) stay, and so does that of the last layer, which is needed again at once. The copy
out runs beside the layer, on a stream of its own; the layer ends when it does. The copy back goes to one of two
buffers in turn, so it runs while the backward of the layer after it does. Those two buffers stay allocated through
the forward too; here they are there while something is in them.

Source: ``UnslothCheckpointFunction`` in ``unsloth_zoo/gradient_checkpointing.py`` of unslothai/unsloth-zoo (0373fcc).

The search by halves for the number of blocks to checkpoint that keeps a budget, the first ones first.

What scripts around ``--recompute-num-layers`` do: try half the layers, then half of what is left. It takes for
granted that one block more never needs more memory. It may: when the last block runs again, the gradients of what
comes after it are already there, which they were not when it first ran. The search then passes over a number
that would have done, and finds a larger one, or none.
"""

from __future__ import annotations

from planner.strategies import _rules as rules
from planner.strategies._step import Strategy

# fmt: off
STRATEGIES = (
    Strategy("pytorch-checkpoint", "torch.utils.checkpoint around every block", rules.checkpoint()),
    Strategy("every", "torch.utils.checkpoint around every N-th block, from the first on",
             rules.checkpoint(lambda blocks, number: blocks[::number]), lambda blocks: 2),
    Strategy("chunked", "every N-th boundary between blocks is kept, the N blocks between run again together",
             rules.checkpoint(rules.in_groups), rules.square_root),
    Strategy("checkpoint-sequential",
             "torch.utils.checkpoint.checkpoint_sequential: N segments, of which the last is left as it is",
             rules.sequential, rules.square_root),
    Strategy("save-on-cpu", "torch.autograd.graph.save_on_cpu around the forward: all that is saved waits on the host",
             rules.save_on_cpu),
    Strategy("offloaded-checkpoint",
             "torch.utils.checkpoint around every block, whose inputs wait on the host (offload_wrapper)",
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
    Strategy("megatron-selective", "Megatron-Core, selective: core attention", rules.core_attention),
    Strategy("megatron-output-discarding",
             "Megatron-Core, selective: outputs of layer norms and activation functions", rules.output_discarding),
    Strategy("deepspeed-cpu-checkpointing",
             "DeepSpeed: every block runs again, its inputs wait on the host (cpu_checkpointing)",
             lambda step, _: rules.inputs_offloaded(step, step.regions(step.blocks, whole=True))),
    Strategy("jax-nothing-saveable", "jax.checkpoint around the whole step, nothing_saveable",
             rules.policy(lambda operation: False)),
    Strategy("jax-dots-saveable", "jax.checkpoint around the whole step, dots_saveable: products are kept",
             rules.policy(rules.is_product_or_attention)),
    Strategy("jax-dots-with-no-batch-dims-saveable",
             "jax.checkpoint around the whole step: products without batch dimensions are kept",
             rules.policy(rules.is_linear)),
    Strategy("jax-offload-dot-with-no-batch-dims",
             "jax.checkpoint around the whole step: products without batch dimensions wait on the host",
             lambda step, _: rules.policy_offloading(step, rules.outputs_of(step, rules.is_linear))),
    Strategy("jax-save-and-offload-only-these-names",
             "jax.checkpoint around the whole step: what enters a block waits on the host",
             lambda step, _: rules.policy_offloading(step, rules.entering_blocks(step))),
    Strategy("tensorflow-recompute-grad", "tf.recompute_grad around every block", rules.checkpoint(whole=True)),
    Strategy("oneflow", "OneFlow's activation_checkpointing flag on every block",
             rules.checkpoint(saved=rules.is_batch_norm, whole=True)),
    Strategy("unsloth",
             "Unsloth: every layer runs again, its input waits on the host if it is large; the last one's stays",
             rules.unsloth),
    Strategy("binary-search",
             "the number of blocks to checkpoint, searched by halves to keep N% of the peak without recompute",
             rules.within_share_of_peak, lambda blocks: 75),
)
# fmt: on
