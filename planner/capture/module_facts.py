"""What can be read off a module tree without running it."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from planner.capture.module_internals import has_full_backward_hooks
from planner.findings.subject import ModuleFacts
from planner.ir.graph import TrainingGraph

_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)

# Classes are known by their names, so that nothing of torch.distributed is imported to ask.
_CHECKPOINTING = {"CheckpointWrapper"}
_SHARDING = {"FSDPModule", "FullyShardedDataParallel"}


def module_facts(model: nn.Module) -> tuple[ModuleFacts, ...]:
    """Describe every module of a model."""
    configured: set[int] = set()
    return tuple(_facts(path, module, configured) for path, module in model.named_modules())


def _facts(path: str, module: nn.Module, configured: set[int]) -> ModuleFacts:
    classes = {cls.__name__ for cls in type(module).__mro__}
    parameters = list(module.parameters())
    config = getattr(module, "config", None)
    # Parts of a model often share its configuration: the outermost one answers for it.
    fills_cache = module.training and id(config) not in configured and getattr(config, "use_cache", False) is True
    configured.add(id(config))
    return ModuleFacts(
        path=path,
        kind=type(module).__name__,
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        trainable=any(p.requires_grad for p in parameters),
        updates_statistics=updates_statistics(module),
        full_backward_hooks=has_full_backward_hooks(module),
        checkpointing_on=bool(classes & _CHECKPOINTING)
        or (module.training and getattr(module, "gradient_checkpointing", False) is True),
        fills_cache=fills_cache,
        finds_unused=isinstance(module, nn.parallel.DistributedDataParallel) and module.find_unused_parameters,
        sharded=bool(classes & _SHARDING),
    )


def updates_statistics(module: nn.Module) -> bool:
    """Whether each call of a module changes its running statistics."""
    return isinstance(module, _WITH_STATISTICS) and module.training and module.running_mean is not None


def tied_parameters(model: nn.Module) -> dict[int, str]:
    """Give, by identity, the parameters that have two names or more, with these."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {parameter: " = ".join(of_it) for parameter, of_it in names.items() if len(of_it) > 1}


def outside_bytes(graph: TrainingGraph) -> int:
    """Count what a model gives to a loss outside the captured step: nothing where it returns its loss, a scalar."""
    if graph.loss_index == len(graph.operations):
        return 0
    received = (graph.values[value] for value in graph.operations[graph.loss_index].outputs)
    sizes = [value.size_bytes for value in received if value.kind == "tangent"]
    return sum(size_bytes for size_bytes in sizes if size_bytes > graph.alignment_bytes)
