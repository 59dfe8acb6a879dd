"""Models to plan for: built from configurations, so nothing is downloaded, and the user's own.

Every model of the zoo takes labels and returns its loss. Under a fake tensor mode, ambient or
passed in, a model of any size costs no memory; it is built in its data type, since a model of
fake tensors cannot be converted afterwards.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from planner.common.registry import did_you_mean
from planner.errors import PlannerError, UsageError
from planner.zoo.catalogue import ZOO, Entry, Sizes, configured

if TYPE_CHECKING:
    import torch

    from planner.capture.torch_internals import FakeTensorMode


CONFIGURATION = "hf:"
"""What the name of a model of a configuration begins with."""


def is_own(specification: str) -> bool:
    """Whether a model is named by what makes it, and not one of the zoo or of a configuration.

    >>> is_own("model.py:make"), is_own("gpt2"), is_own("hf:openai-community/gpt2")
    (True, False, False)
    """
    return ":" in specification and not specification.startswith(CONFIGURATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """A model in training mode, and what to call it with in one training step."""

    name: str
    """Name in the zoo, or the specification that it was loaded from."""
    model: torch.nn.Module
    example_args: tuple[Any, ...] = ()
    example_kwargs: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    """From the model's output to the loss. Without it the output is the loss, or has one as ``.loss``."""


def names() -> tuple[str, ...]:
    """Names of the zoo's models."""
    return tuple(ZOO)


def describe(name: str) -> str:
    """Say in one line what a model is and which sizes it has by default.

    >>> describe("llama-7b")
    'LLaMA 7B (transformers), 6.7B parameters; batch 4, 2048 tokens, 32 layers, bfloat16'
    """
    entry = _entry(name)
    sizes = entry.sizes
    extent = f"{sizes.seq_len} {entry.length_name}" if sizes.seq_len else f"images of {sizes.image_size}"
    return f"{entry.description}; batch {sizes.batch_size}, {extent}, {sizes.layers} {entry.layer_name}, {sizes.dtype}"


def build(
    name: str,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    image_size: int | None = None,
    dtype: str | torch.dtype | None = None,
    layers: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    fake_mode: FakeTensorMode | None = None,
) -> ZooModel:
    """Build a model of the zoo, one of :func:`names` in any case, with random weights and inputs of a seed.

    Sizes are by default those of :func:`describe`; widths stay what they are. ``dtype`` is the element type of
    parameters and inputs. Under ``fake_mode``, or an ambient one, these and buffers are fake tensors. The global
    random state is left as it was.

    A UsageError says that there is no such model, that it has no such size, or that ``transformers`` is not installed.
    """
    import torch

    entry = _entry(name)
    wanted = {"batch_size": batch_size, "seq_len": seq_len, "image_size": image_size, "layers": layers}
    sizes = _chosen(name, {size: value for size, value in wanted.items() if value is not None}, dtype)
    with _building(getattr(torch, sizes.dtype), seed, device, fake_mode):
        model, classes = entry.make(sizes=sizes)
        example = entry.example(sizes, classes)
    name = name if name.startswith(CONFIGURATION) else name.lower()
    return ZooModel(name=name, model=model.train(), example_kwargs=example)


def check_sizes(specification: str, sizes: Mapping[str, int]) -> None:
    """Raise UsageError for sizes that the zoo's model does not have or allow, or the user's factory does not take."""
    if is_own(specification):
        with _factory(specification) as (factory, _):
            _check_takes(specification, factory, sizes)
    else:
        _chosen(specification, sizes, None)


def load_user_model(
    specification: str, *, sizes: Mapping[str, int] | None = None, fake_mode: FakeTensorMode | None = None
) -> ZooModel:
    """Call a factory of the user's, ``path/to/file.py:factory`` or ``package.module:factory``.

    It takes keywords of the names of ``sizes``, needs none, and returns ``(model, example_inputs)`` or
    ``(model, example_inputs, loss_fn)``; the example inputs are a tensor, a tuple of arguments, or a dict of keyword
    arguments. In place of a factory stands a model, or its class, with ``example_inputs`` (a value, or a function that
    makes it) and ``loss_fn`` in it or beside it in the file.

    A UsageError says that there is no such file, module or factory, that it takes no such size, raises, or returns
    something else.
    """
    with _factory(specification) as (factory, module), fake_mode or nullcontext():
        _check_takes(specification, factory, sizes or {})
        with _told(f"factory {specification!r} failed", "call it alone to see where"):
            made = _with_example(factory(**(sizes or {})), module)
    return _from_factory(specification, made)


@contextmanager
def _factory(specification: str) -> Iterator[tuple[Callable[..., Any], ModuleType]]:
    """Import a factory and its module, and let it import what lies beside it; a model that is there makes itself."""
    place, colon, attribute = specification.rpartition(":")
    if not (colon and place and attribute.isidentifier()):
        raise UsageError(f"cannot read model {specification!r}: {_FACTORY_HINT}")
    path = Path(place) if place.endswith(".py") else None
    with _importable(path.resolve().parent if path else Path.cwd()):
        if path and not path.is_file():
            raise UsageError(f"there is no file {place!r} for model {specification!r}: check the path")
        with _told(f"cannot import {place!r} for model {specification!r}", "import it alone to see where"):
            module = _module_of_file(path) if path else import_module(place)
        factory = getattr(module, attribute, None)
        if not callable(factory):
            known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            hint = did_you_mean(attribute, known, cutoff=0.4, write=str).rstrip() or _FACTORY_HINT
            raise UsageError(f"{place!r} has no function {attribute!r}: {hint}")
        is_model = hasattr(factory, "named_modules") and not isinstance(factory, type)
        yield (lambda: factory) if is_model else factory, module


@contextmanager
def _told(said: str, advice: str) -> Iterator[None]:
    """Say in one line what the user's own code raises."""
    try:
        yield
    except PlannerError:
        raise
    except (Exception, SystemExit) as error:  # a script without a main guard may end itself
        from planner.capture.failures import in_one_line

        raise UsageError(f"{said}: {in_one_line(error)}; {advice}") from error


def _check_takes(specification: str, factory: Callable[..., Any], sizes: Iterable[str]) -> None:
    for size in sizes:
        try:
            inspect.signature(factory).bind_partial(**{size: 1})
        except (TypeError, ValueError):
            raise UsageError(
                f"factory {specification!r} takes no {size}: give it a parameter of that name, with a default"
            ) from None


_FACTORY_HINT = (
    "write path/to/file.py:factory or package.module:factory, where factory() returns (model, example_inputs) "
    "or (model, example_inputs, loss_fn)"
)


def _with_example(made: Any, module: ModuleType) -> Any:
    """Return a model alone with the example inputs and the loss in it or beside it, if there are any."""
    found = [getattr(made, name, getattr(module, name, None)) for name in ("example_inputs", "loss_fn")]
    if isinstance(made, (tuple, list)) or found[0] is None:
        return made
    return made, found[0]() if callable(found[0]) else found[0], found[1]


def _from_factory(specification: str, made: Any) -> ZooModel:
    import torch

    def refused(what: str) -> UsageError:
        return UsageError(f"factory {specification!r} must return (model, example_inputs[, loss_fn]): {what}")

    if not isinstance(made, (tuple, list)) or len(made) not in (2, 3):
        length = f" of {len(made)}" if isinstance(made, (tuple, list)) else ""
        beside = " alone, with no example_inputs in it or in its file" if isinstance(made, torch.nn.Module) else ""
        raise refused(f"it returned {_kind(made)}{length}{beside}")
    model, inputs, loss_fn = made if len(made) == 3 else (*made, None)
    if not isinstance(model, torch.nn.Module):
        raise refused(f"the model is {_kind(model)}, not a torch.nn.Module")
    if not (loss_fn is None or callable(loss_fn)):
        raise refused(f"the loss function is {_kind(loss_fn)}, which cannot be called")
    if isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs):
        return ZooModel(name=specification, model=model, example_kwargs=dict(inputs), loss_fn=loss_fn)
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, (tuple, list)):
        raise refused(f"the example inputs are {_kind(inputs)}, not a tensor, tuple or dict of names")
    return ZooModel(name=specification, model=model, example_args=tuple(inputs), loss_fn=loss_fn)


def _kind(made: Any) -> str:
    name = type(made).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let imports find what lies in a folder, as Python does for a script."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # what was imported may have tidied up after itself
            sys.path.remove(str(folder))


def _module_of_file(path: Path) -> ModuleType:
    # A name of its own, for a file called json.py must not hide the real one.
    name = f"_planner_model_{path.stem}"
    spec = util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = sys.modules[name] = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _building(dtype: torch.dtype, seed: int, device: str, fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """Build in a data type, on a device, from a seed, and leave no trace of them."""
    import torch

    before = torch.get_default_dtype()
    where = torch.device(device) if device != "cpu" else nullcontext()
    with torch.random.fork_rng(devices=[]), fake_mode or nullcontext(), where:
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _entry(name: str) -> Entry:
    if name.startswith(CONFIGURATION):
        return configured(name.removeprefix(CONFIGURATION))
    if entry := ZOO.get(name.lower()):
        return entry
    hint = did_you_mean(name.lower(), ZOO, cutoff=0.4, write=str).rstrip() or f"known are {', '.join(ZOO)}"
    if name.endswith(".py"):
        try:
            parts = ast.parse(Path(name).read_bytes()).body
        except (OSError, SyntaxError, ValueError) as error:
            raise UsageError(f"cannot read {name!r}: {error}") from None
        there = [part.name for part in parts if isinstance(part, (ast.FunctionDef, ast.ClassDef))]
        raise UsageError(f"name the function: {name} has {', '.join(there) or 'no function'}; {_FACTORY_HINT}")
    raise UsageError(f"unknown model {name!r}: {hint}; your own is path/to/file.py:factory")


def _chosen(name: str, given: Mapping[str, int], dtype: str | torch.dtype | None) -> Sizes:
    default = (entry := _entry(name)).sizes
    dtype = str(dtype or default.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UsageError(f"models cannot be built in {dtype!r}: choose one of {', '.join(_DTYPES)}")
    for size, value in given.items():
        if getattr(default, size) is None:
            raise UsageError(f"model {name!r} has no {size}: leave it out")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{size} of model {name!r} must be a whole number above zero, not {value!r}")
    if default.positions is not None and given.get("seq_len", 0) > default.positions:
        limit = f"model {name!r} takes at most {default.positions} {entry.length_name} (max_position_embeddings)"
        raise UsageError(f"{limit}: seq_len {given['seq_len']} is too long")
    return replace(default, dtype=dtype, **given)


_DTYPES = ("float32", "bfloat16", "float16", "float64")
