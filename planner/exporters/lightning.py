"""Lightning: the policy of ``FSDPStrategy(activation_checkpointing_policy=...)``.

A callable is handed to ``apply_activation_checkpointing`` as its ``auto_wrap_policy`` and is told modules,
not names; so it is made from the model, and looks for the same objects.
Source: ``src/lightning/fabric/strategies/fsdp.py`` (_setup_activation_checkpointing) in
Lightning-AI/pytorch-lightning, and https://lightning.ai/docs/pytorch/stable/advanced/model_parallel/fsdp.html.
"""

from __future__ import annotations

from planner.exporters._whole_modules import WholeModules


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


EXPORTER = _Lightning()
