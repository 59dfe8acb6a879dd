"""The device that a plan is for, by name: one of the table, or one that a file describes. The file is data."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import cost_models
from cost_models.devices import DeviceSpec, library_bytes
from planner.common.atomic import write_text
from planner.common.json_reader import Node, parse
from planner.errors import DeviceFileError, PlanFileError, UsageError

SCHEMA = 1

_LARGEST_FILE_BYTES = 1 << 20
_RATES = ("float64", "float32", "tf32", "float16", "bfloat16")


def find(name: str) -> DeviceSpec:
    """Find a device by its name in the table, or read the file that describes one.

    Parameters
    ----------
    name : str
        What ends in ``.json`` is a file.

    Raises
    ------
    UsageError
        If there is no such device; the message lists near names.
    DeviceFileError
        If the file cannot be read or describes no device.
    """
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
    ``flops_per_second`` (with ``float32`` in it) must be there.

    Raises
    ------
    DeviceFileError
        If it cannot be read, or a field is missing or of the wrong kind.
    """
    try:
        with open(path, "rb") as stream:
            content = stream.read(_LARGEST_FILE_BYTES)
        root = Node(parse(content.decode("utf-8")), "the device")
        return _spec(root)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DeviceFileError(f"cannot read device file {path}: {reason}") from error
    except PlanFileError as error:
        raise DeviceFileError(f"{path}: {error}") from error


def _spec(root: Node) -> DeviceSpec:
    if root.has("schema") and root["schema"].integer() != SCHEMA:
        raise PlanFileError(f"the file is of schema {root['schema'].integer()}, and schema {SCHEMA} can be read here")
    kind = root["kind"].one_of("cpu", "cuda")
    defaults = cost_models.device("cpu" if kind == "cpu" else "a100-80")
    known = {"schema", *DeviceSpec.__dataclass_fields__}
    if unknown := [key for key, _ in root.fields() if key not in known]:
        raise PlanFileError(f"{unknown[0]} is no field of a device: they are {', '.join(sorted(known))}")

    def number(key: str, default: float | None = None) -> float:
        value = default if default is not None and not root.has(key) else root[key].number()
        if value <= 0:
            raise PlanFileError(f"{key} must be above zero")
        return value

    def link() -> float:  # 0 says that there is none
        key = "host_link_bytes_per_second"
        return root[key].number() if root.has(key) else defaults.host_link_bytes_per_second

    def whole(key: str, default: int) -> int:
        return root[key].integer() if root.has(key) else default

    rates = {key: node.number() for key, node in root["flops_per_second"].fields()}
    if wrong := [key for key, rate in rates.items() if key not in _RATES or rate <= 0]:
        raise PlanFileError(f"flops_per_second.{wrong[0]} must be above zero, and one of {', '.join(_RATES)}")
    if "float32" not in rates:
        raise PlanFileError("flops_per_second.float32 is missing")
    architecture = root["architecture"].text() if root.has("architecture") else "" if kind == "cpu" else "sm80"
    return DeviceSpec(
        name=root["name"].text(),
        kind="cpu" if kind == "cpu" else "cuda",
        memory_bytes=root["memory_bytes"].integer(),
        bandwidth_bytes_per_second=number("bandwidth_bytes_per_second"),
        flops_per_second=rates,
        launch_seconds=number("launch_seconds", defaults.launch_seconds),
        alignment_bytes=max(1, whole("alignment_bytes", defaults.alignment_bytes)),
        host_link_bytes_per_second=link(),
        source=root["source"].text() if root.has("source") else "a device file",
        compute_efficiency=number("compute_efficiency", defaults.compute_efficiency),
        bandwidth_efficiency=number("bandwidth_efficiency", defaults.bandwidth_efficiency),
        cores=max(1, whole("cores", defaults.cores)),
        architecture=architecture,
        library_bytes=whole("library_bytes", library_bytes(architecture)),
    )
