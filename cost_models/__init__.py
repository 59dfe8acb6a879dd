"""Cost models of operations: one file for each way of knowing a cost.

Importing this package imports neither torch nor the planner.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from cost_models.base import CostedOperation, CostModel, CostModelFactory, OperationCost
from cost_models.devices import DeviceSpec, UnknownNameError, device

__all__ = [
    "CostModel",
    "CostModelFactory",
    "CostedOperation",
    "DeviceSpec",
    "OperationCost",
    "UnknownNameError",
    "device",
    "get",
    "names",
]


@cache
def _found() -> dict[str, CostModelFactory]:
    modules = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    factories: list[CostModelFactory] = [module.COST_MODEL for module in modules if hasattr(module, "COST_MODEL")]
    return {factory.name: factory for factory in factories}


def names() -> tuple[str, ...]:
    """Names of all cost models, sorted.

    Examples
    --------
    >>> "roofline" in names()
    True
    """
    return tuple(sorted(_found()))


def get(name: str) -> CostModelFactory:
    """Find a cost model by name, or raise UnknownNameError; call it with a :class:`DeviceSpec`.

    Examples
    --------
    >>> get("roofline")(device("a100-80")).device.name
    'a100-80'
    """
    try:
        return _found()[name]
    except KeyError:
        raise UnknownNameError("cost model", name, names()) from None
