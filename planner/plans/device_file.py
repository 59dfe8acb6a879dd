"""The device that a plan is for, by name: one of the table, or one that a file describes. The file is data."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import cost_models
from cost_models.devices import DeviceSpec, library_bytes
from planner.common import json_reader
from planner.common.atomic import write_text
from planner.common.json_reader import Node, parse
from planner.errors import DeviceFileError, PlanFileError, UsageError

SCHEMA = 1

_LARGEST_FILE_BYTES = 1 << 20
_NEEDED = ("name", "kind", "memory_bytes", "bandwidth_bytes_per_second", "flops_per_second")
_ABOVE_ZERO = ("bandwidth_bytes_per_second", "launch_seconds", "compute_efficiency", "bandwidth_efficiency")
_RATES = ("float64", "float32", "tf32", "float16", "bfloat16")


def find(name: str) -> DeviceSpec:
    """Find a device in the table, or read the ``.json`` file that describes one; a UsageError lists near names."""
    if name.endswith(".json"):
        return load(name)
    try:
        return cost_models.device(name)
    except cost_models.UnknownNameError as error:
        raise UsageError(f"{error}; a device of your own is a .json file that 'calibrate' writes") from error


def save(spec: DeviceSpec, path: str | Path) -> None:
    """Write a device file, whole or not at all."""
    data = {"schema": SCHEMA, **asdict(spec)}
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def load(path: str | Path) -> DeviceSpec:
    """Read a device file.

    Fields that a person need not know have the defaults of :class:`~cost_models.devices.DeviceSpec`:
    only ``name``, ``kind``, ``memory_bytes``, ``bandwidth_bytes_per_second`` and
    ``flops_per_second`` (with ``float32`` in it) must be there. A DeviceFileError says that the file cannot be read,
    or that a field is missing or of the wrong kind.
    """
    return json_reader.load(path, "device file", _from_json, DeviceFileError, _LARGEST_FILE_BYTES)


def _from_json(text: str) -> DeviceSpec:
    root = parse(text, "device")
    if root.has("schema") and (schema := root["schema"].read(int)) != SCHEMA:
        raise PlanFileError(f"the file is of schema {schema}, and only schema {SCHEMA} can be read here")
    known = {"schema", *DeviceSpec.__dataclass_fields__}
    if unknown := [key for key in root.names() if key not in known]:
        raise PlanFileError(f"{unknown[0]} is no field of a device: they are {', '.join(sorted(known))}")
    defaults = asdict(cost_models.device("cpu" if root["kind"].value == "cpu" else "a100-80"))
    architecture = root["architecture"].read(str) if root.has("architecture") else defaults["architecture"]
    defaults |= {"source": "a device file", "library_bytes": library_bytes(architecture)}
    given = {key: value for key, value in defaults.items() if key not in _NEEDED} | root.value
    spec = Node(given, root.where).read(DeviceSpec)
    for key in _ABOVE_ZERO:
        if getattr(spec, key) <= 0:
            raise PlanFileError(f"{key} must be above zero")
    if wrong := [key for key, rate in spec.flops_per_second.items() if key not in _RATES or rate <= 0]:
        raise PlanFileError(f"flops_per_second.{wrong[0]} must be above zero, and one of {', '.join(_RATES)}")
    if "float32" not in spec.flops_per_second:
        raise PlanFileError("flops_per_second.float32 is missing")
    return replace(spec, alignment_bytes=max(1, spec.alignment_bytes), cores=max(1, spec.cores))
