"""The JSON of a profile, schema 1. It is data: reading one checks every field and executes nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cost_models.measured import Measurement, Profile, ProfiledOperation
from planner.common.atomic import write_text
from planner.common.json_reader import Node, parse
from planner.errors import PlanFileError, ProfileFileError

SCHEMA = 1
KIND = "checkpoint-planner profile"

_LARGEST_FILE_BYTES = 256 * 2**20


def save(profile: Profile, path: str | Path) -> None:
    """Write a profile, whole or not at all.

    Parameters
    ----------
    profile : Profile
    path : str or Path
    """
    write_text(path, to_json(profile))


def to_json(profile: Profile) -> str:
    """Give the text of a profile file: each signature once, operations by its number."""
    numbers = {signature: number for number, signature in enumerate(profile.measurements)}
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": KIND,
        "model": profile.model,
        "device": profile.device,
        "torch": profile.torch,
        "date": profile.date,
        "inputs": [list(shape) for shape in profile.inputs],
        "measurements": [{"signature": s, **asdict(m)} for s, m in profile.measurements.items()],
        "operations": [
            {
                "key": operation.key,
                "measurement": numbers.get(operation.signature),
                "target": operation.target,
                "dtype": operation.dtype,
                "flops": operation.flops,
                "moved_bytes": operation.moved_bytes,
            }
            for operation in profile.operations
        ],
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def load(path: str | Path) -> Profile:
    """Read a profile file.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    Profile

    Raises
    ------
    ProfileFileError
        If it cannot be read, is damaged, of another schema, or not a profile.
    """
    try:
        with open(path, "rb") as stream:
            content = stream.read(_LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ProfileFileError(f"cannot read profile {path}: {reason}") from error
    if len(content) > _LARGEST_FILE_BYTES:
        raise ProfileFileError(f"{path} is over {_LARGEST_FILE_BYTES} bytes, which no real profile is")
    try:
        return from_json(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ProfileFileError(f"{path} is not a profile: it is not UTF-8 text") from error
    except PlanFileError as error:
        raise ProfileFileError(f"{path}: {error}") from error


def from_json(text: str) -> Profile:
    """Read the text of a profile file.

    Raises
    ------
    PlanFileError
        Naming the field that is wrong.
    """
    root = Node(parse(text), "the profile")
    if not root.has("kind") or root["kind"].text() != KIND:
        raise PlanFileError("this is no profile; 'checkpoint-planner profile MODEL --output FILE' writes one")
    if (schema := root["schema"].integer()) != SCHEMA:
        raise PlanFileError(f"the profile is of schema {schema}, and schema {SCHEMA} is what can be read here")
    measurements: dict[str, Measurement] = {}
    for node in root["measurements"].items():
        measurements[node["signature"].text()] = Measurement(
            seconds=node["seconds"].number(),
            runs=node["runs"].integer(),
            workspace_bytes=node["workspace_bytes"].integer(),
        )
    signatures = list(measurements)
    operations = []
    for node in root["operations"].items():
        number = None if node["measurement"].is_null() else node["measurement"].integer()
        if number is not None and number >= len(signatures):
            raise PlanFileError(f"an operation names measurement {number} of {len(signatures)}")
        operations.append(
            ProfiledOperation(
                key=node["key"].text(),
                signature="" if number is None else signatures[number],
                target=node["target"].text(),
                dtype=node["dtype"].text(),
                flops=node["flops"].integer(),
                moved_bytes=node["moved_bytes"].integer(),
            )
        )
    return Profile(
        model=root["model"].text(),
        device=root["device"].text(),
        torch=root["torch"].text(),
        date=root["date"].text(),
        inputs=tuple(tuple(size.integer() for size in shape.items()) for shape in root["inputs"].items()),
        measurements=measurements,
        operations=tuple(operations),
    )
