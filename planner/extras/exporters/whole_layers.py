"""Rarer frameworks that checkpoint whole layers: Axolotl, Unsloth, Lightning and DeepSpeed.

Axolotl: ``gradient_checkpointing`` of its YAML.

``gradient_checkpointing_kwargs`` go to the Trainer of transformers, which takes ``every_n_layers`` out of
them. ``selective_checkpointing``, which keeps what some operators make in these layers, is not used.
Source: ``src/axolotl/utils/schemas/config.py`` and ``src/axolotl/core/builders/base.py`` in
axolotl-ai-cloud/axolotl, and https://docs.axolotl.ai/docs/config-reference.html.

Unsloth: ``use_gradient_checkpointing`` and ``checkpoint_skip_layers`` of ``get_peft_model``.

Every layer is checkpointed but so many that are spread evenly, the last of each share. The value
``"unsloth"`` would move boundaries to host memory, which the plan does not count on.
Source: ``unsloth/models/_utils.py`` (skip_checkpointing) and ``unsloth/models/llama.py`` (get_peft_model)
in unslothai/unsloth, and https://docs.unsloth.ai.

Lightning: the policy of ``FSDPStrategy(activation_checkpointing_policy=...)``.

A callable is handed to ``apply_activation_checkpointing`` as its ``auto_wrap_policy`` and is told modules,
not names; so it is made from the model, and looks for the same objects.
Source: ``src/lightning/fabric/strategies/fsdp.py`` (_setup_activation_checkpointing) in
Lightning-AI/pytorch-lightning, and https://lightning.ai/docs/pytorch/stable/advanced/model_parallel/fsdp.html.

DeepSpeed: its configuration, and the code that wraps modules in ``deepspeed.checkpointing``.

The JSON says how checkpoints are kept and not where they are, so the modules are wrapped in code. Its
``contiguous_memory_optimization`` is left off: it needs ``partition_activations`` and a
``number_checkpoints``. Its ``checkpoint`` is reentrant and runs all of a module again.
Source: ``deepspeed/runtime/activation_checkpointing/config.py`` and ``checkpointing.py`` in
deepspeedai/DeepSpeed, and https://deepspeed.readthedocs.io/en/latest/activation-checkpointing.html.
"""

from __future__ import annotations

from planner.exporters._export import Placement
from planner.exporters._step import ExportStep
from planner.exporters._whole_modules import OwnLayers, WholeModules
from planner.plans.plan import Plan


class _Axolotl(OwnLayers):
    name = "axolotl"
    summary = "every n-th layer runs again, where the plan chooses single operations"
    language = "yaml"
    eager = True
    to_the_end = False
    lost = ("Axolotl patches models and may run other kernels: the choice carries over by counting layers",)

    def place(self, step: ExportStep) -> Placement:
        return step.best_of(
            Placement(groups=tuple((layer,) for layer in step.row[::n]), settings={"every_n_layers": n})
            for n in range(1, len(step.row) + 1)
        )

    def write(self, placement: Placement, plan: Plan) -> str:
        if not placement.groups:
            return "gradient_checkpointing: false\n"
        return f"""\
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
  every_n_layers: {placement.settings["every_n_layers"]}
"""


class _Unsloth(OwnLayers):
    name = "unsloth"
    summary = "every layer runs again but some that it spreads evenly, where the plan chooses single operations"
    eager = True
    lost = ("Unsloth replaces parts of the layers by kernels of its own, and checkpoints with reentrance",)

    def place(self, step: ExportStep) -> Placement:
        placements, row = [], step.row
        for count in range(len(row)):
            kept = {(share + 1) * len(row) // count - 1 for share in range(count)}
            groups = tuple((layer,) for index, layer in enumerate(row) if index not in kept)
            placements.append(Placement(groups=groups, settings={"checkpoint_skip_layers": count}))
        return step.best_of(placements)

    def write(self, placement: Placement, plan: Plan) -> str:
        skipped = placement.settings.get("checkpoint_skip_layers", 0)
        return f"""\
# FastLanguageModel.get_peft_model(model, **CHECKPOINTING, ...)
CHECKPOINTING = {{
    "use_gradient_checkpointing": {bool(placement.groups)},
    "checkpoint_skip_layers": {skipped},
}}
"""


class _Lightning(WholeModules):
    name = "lightning"
    template = """\
# Make the model before the strategy: Trainer(strategy=planned_strategy(model), ...). The model is the one that
# training_step calls, made in __init__ and not in configure_model.

{modules}

def checkpointing_policy(model):
    chosen = {{id(model.get_submodule(name)) for name in MODULES}}

    def policy(module, recurse, nonwrapped_numel):
        return recurse or id(module) in chosen

    return policy


def planned_strategy(model, **options):
    from lightning.pytorch.strategies import FSDPStrategy

{without_cache}    return FSDPStrategy(activation_checkpointing_policy=checkpointing_policy(model), **options)
"""


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


EXPORTER = (_Axolotl(), _Unsloth(), _Lightning(), _DeepSpeed())
