"""What people use in place of a planner, each put into a model and taken out again.

A peer is tried as its documentation says. Where it cannot run a model, the reason is part of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from planner.capture.blocks.regions import Step
from planner.capture.common_subexpressions import eliminate_common_subexpressions
from planner.capture.inputs import Inputs
from planner.capture.torch_internals import aot_backend, call_implementation
from planner.zoo import ZooModel

aten = torch.ops.aten

MATRIX_PRODUCTS = (
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.convolution.default,
    aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)  # fmt: skip
"""What selective checkpointing saves; torchtitan's list, with convolutions for those models that have them."""


class NotForThisModelError(Exception):
    """A peer cannot run a model; the message says why."""


@dataclass(frozen=True)
class Peer:
    """A way to run a model.

    Parameters
    ----------
    name : str
    put_in : callable
        Changes the model, or gives what is to run in place of its call; the context ends with the model as it was.
    compiles : bool
        Whether Dynamo looks at the model: at one that others change it would look again each time.
    """

    name: str
    put_in: Callable[[ZooModel], Any]
    compiles: bool = False


def _blocks(loaded: ZooModel) -> dict[str, nn.Module]:
    return Step(loaded.model, Inputs(loaded.example_args, loaded.example_kwargs)).find_blocks()


@contextmanager
def _nothing(_loaded: ZooModel) -> Iterator[Any]:
    yield None


@contextmanager
def _each_block(loaded: ZooModel, n: int, **settings: Any) -> Iterator[Any]:
    """Checkpoint every n-th repeated block by ``torch.utils.checkpoint``."""
    blocks = list(_blocks(loaded).values())[::n]
    if not blocks:
        raise NotForThisModelError("it has no repeated blocks")
    try:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **settings)
        yield None
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)


def _save_products() -> Any:
    def policy(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        saved = operator in MATRIX_PRODUCTS
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@contextmanager
def _sequential(loaded: ZooModel) -> Iterator[Any]:
    """Let ``checkpoint_sequential`` cut each ``nn.Sequential`` of blocks into about the root of their number."""
    blocks = set(_blocks(loaded).values())
    chains = [
        module
        for module in loaded.model.modules()
        if isinstance(module, nn.Sequential) and len(module) > 1 and blocks.issuperset(module)
    ]
    if not chains:
        raise NotForThisModelError("its blocks are not in an nn.Sequential, which checkpoint_sequential needs")
    try:
        for chain in chains:
            segments = max(1, round(len(chain) ** 0.5))
            run = partial(checkpoint_sequential, list(chain), segments, use_reentrant=False)
            chain.forward = run  # type: ignore[method-assign]
        yield None
    finally:
        for chain in chains:
            chain.__dict__.pop("forward", None)


@contextmanager
def _hugging_face(loaded: ZooModel, n: int) -> Iterator[Any]:
    """Use the switch of a Hugging Face model."""
    model: Any = loaded.model
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise NotForThisModelError("it is no model of Hugging Face's")
    try:
        model.gradient_checkpointing_enable(every_n_layers=n)
        yield None
    except (ValueError, TypeError) as error:
        raise NotForThisModelError(f"Hugging Face's switch refuses it: {error}") from error
    finally:
        model.gradient_checkpointing_disable()


@contextmanager
def _partitioner(loaded: ZooModel, ratio: float, solver: str) -> Iterator[Any]:
    """Compile with PyTorch's min-cut partitioner under an ``activation_memory_budget``; boxed code, no Inductor."""
    import torch._functorch.config as functorch_config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    settings = {
        "activation_memory_budget": ratio,
        "activation_memory_budget_solver": solver,
        "activation_memory_budget_runtime_estimator": "flops",
    }

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **others: Any) -> Any:
        joint.graph = eliminate_common_subexpressions(joint.graph)
        with functorch_config.patch(settings):
            return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)

    yield torch.compile(_own_call(loaded.model), backend=aot_backend(partition), fullgraph=True, dynamic=False)


@contextmanager
def _inductor(loaded: ZooModel, ratio: float = 1.0) -> Iterator[Any]:
    """Compile by defaults, but for an ``activation_memory_budget``."""
    import torch._functorch.config as functorch_config

    with functorch_config.patch(activation_memory_budget=ratio):
        yield torch.compile(_own_call(loaded.model), fullgraph=True, dynamic=False)


def _own_call(model: nn.Module) -> Callable[..., Any]:
    """Return a function of its own code object, by which Dynamo keeps its graphs, that runs a model."""
    space: dict[str, Any] = {"run": call_implementation(model)}
    exec("def call(*args, **kwargs):\n    return run(*args, **kwargs)", space)
    call: Callable[..., Any] = space["call"]
    return call


@contextmanager
def _ckptplan(loaded: ZooModel) -> Iterator[Any]:
    """Profile and plan as its documentation shows, for half of what it counts as saveable."""
    try:
        import ckptplan
    except ImportError:
        raise NotForThisModelError("it is not installed (pip install --no-deps ckptplan==0.1.0rc1)") from None
    try:
        declared = ckptplan.declare_blocks(loaded.model, list(_blocks(loaded).items()))
        device = next(loaded.model.parameters()).device
        profiles = ckptplan.profile_blocks(declared, loaded.example_args, loaded.example_kwargs, device=device)
        made = ckptplan.plan_checkpoints(profiles, declared, target_kind="activation_saving_fraction", target_value=0.5)
        chain = ckptplan.apply_plan(declared, made, loaded.example_args, loaded.example_kwargs)
    except Exception as error:
        raise NotForThisModelError(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    yield chain


INDUCTOR = "Inductor"
"""What ``torch.compile`` alone is called in tables."""


def compiled_peers(ratios: Sequence[float]) -> list[Peer]:
    """Return eager, ``torch.compile`` alone, and what that makes of each ``activation_memory_budget`` below 1."""
    return [
        Peer("eager", _nothing),
        Peer(INDUCTOR, _inductor, compiles=True),
        *(
            Peer(f"{INDUCTOR}, budget {ratio:g}", partial(_inductor, ratio=ratio), compiles=True)
            for ratio in ratios
            if ratio < 1
        ),
    ]


def peers(ratios: Sequence[float]) -> list[Peer]:
    """Return the alternatives in the order of the tables; plain eager is first."""
    solvers = ["dp", "ilp"]
    return [
        Peer("eager", _nothing),
        Peer("every layer", partial(_each_block, n=1)),
        Peer("every second layer", partial(_each_block, n=2)),
        Peer("save products", partial(_each_block, n=1, context_fn=_save_products)),
        Peer("checkpoint_sequential", _sequential),
        Peer("Hugging Face, every layer", partial(_hugging_face, n=1)),
        Peer("Hugging Face, every second", partial(_hugging_face, n=2)),
        *(
            Peer(f"partitioner {solver} {ratio:g}", partial(_partitioner, ratio=ratio, solver=solver), compiles=True)
            for solver in solvers
            for ratio in ratios
            if ratio < 1 or solver == solvers[0]
        ),
        Peer("ckptplan", _ckptplan),
    ]
