"""Module path and source line of each node of the joint graph."""

from __future__ import annotations

import os
import re
import sysconfig
from dataclasses import dataclass

import torch
from torch import fx

import cost_models
import planner
from planner.capture.joint import is_backward

_SOURCE_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_ROOT = re.compile(r"^[LG]\[(['\"]).*?\1\]")
_LIBRARIES = tuple(os.path.join(package.__path__[0], "") for package in (torch, planner, cost_models))
_ZOO = os.path.join(planner.__path__[0], "zoo", "")
"""Folders by which files are told from those of users, whatever their base names."""

_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")
"""Where Python's own modules lie, and installed packages may."""

_DICT = re.compile(r"\.__dict__\[(['\"])_modules\1\]")
"""How Dynamo says where a module is found whose class has a ``__getattr__`` of its own."""

_STEP = re.compile(r"\._modules\[(['\"])(.*?)\1\]|\[(['\"])(.*?)\3\]|\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Place:
    """Path of the module and ``file:line`` of the user's code; empty where unknown."""

    module: str = ""
    source: str = ""


def places_of(graph: fx.Graph) -> dict[fx.Node, Place]:
    """Return the place of every node; a backward node takes that of the forward node it belongs to.

    AOTAutograd gives a backward node the sequence number of the forward node whose derivative it computes.
    """
    own = {node: Place(_module(node), _source(node)) for node in graph.nodes}
    of_sequence = {n.meta.get("seq_nr"): place for n, place in own.items() if place.module and not is_backward(n)}
    of_sequence.pop(None, None)  # of nodes without a number
    found = {}
    for node, place in own.items():
        origin = place if place.module else of_sequence.get(node.meta.get("seq_nr"), place)
        found[node] = Place(origin.module, place.source or origin.source)
    return found


def module_path(dynamo_path: str) -> str:
    """Turn Dynamo's name of a module into the one that ``named_modules`` has.

    >>> module_path("L['model'].transformer._modules['h']._modules['0'].attn")
    'transformer.h.0.attn'
    >>> module_path("L['fn'].__self__.__dict__['_modules']['down_blocks']._modules['0'].conv")
    'down_blocks.0.conv'
    """
    path = _DICT.sub("", _ROOT.sub("", dynamo_path).removeprefix(".__self__"))
    path = _STEP.sub(lambda m: "." + next(g for g in (m[2], m[4], m[5]) if g is not None), path)
    return path.strip(".")


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return module_path(list(stack.values())[-1][0]) if stack else ""


def _source(node: fx.Node) -> str:
    # Dynamo lists the innermost call last; of the user's code that line is wanted, not of torch's or ours.
    found = _SOURCE_LINE.findall(node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in found if not is_library(file)]
    return f"{short_path(own[-1][0])}:{own[-1][1]}" if own else ""


def short_path(file: str) -> str:
    """Return a path as people name it: from the working directory, or from where packages are installed.

    >>> short_path("anywhere/lib/site-packages/transformers/loss/loss_utils.py")
    'transformers/loss/loss_utils.py'
    >>> short_path("somewhere/ipykernel_321/1612897602.py")
    'notebook cell'
    """
    if os.path.basename(os.path.dirname(file)).startswith("ipykernel_"):
        return "notebook cell"  # of which Jupyter makes a file whose name says nothing
    packages = f"{os.sep}site-packages{os.sep}"
    if packages in file:
        return file.rpartition(packages)[2]
    beneath = os.path.relpath(file)
    return file if beneath.startswith(os.pardir) else beneath


def is_library(file: str) -> bool:
    """Whether a file is Python's, torch's or the planner's; a model of the zoo is as good as a user's."""
    if file.startswith(_PYTHON) and not any(f"{os.sep}{kind}-packages{os.sep}" in file for kind in ("site", "dist")):
        return True
    return file.startswith(("<", *_LIBRARIES)) and not file.startswith(_ZOO)
