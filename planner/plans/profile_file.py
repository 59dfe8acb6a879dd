"""The JSON of a profile, schema 1. It is data: reading one checks every field and executes nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cost_models.measured import Measurement, Profile, ProfiledOperation
from planner.common import json_reader
from planner.common.atomic import write_text
from planner.common.json_reader import parse, to_data
from planner.common.program import program
from planner.errors import PlanFileError, ProfileFileError

SCHEMA = 1
KIND = "checkpoint-planner profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measurement(Measurement):
    signature: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """With its signature's number: each signature stands in the file once."""

    key: str
    measurement: int | None
    target: str
    dtype: str
    flops: int
    moved_bytes: int


def save(profile: Profile, path: str | Path) -> None:
    """Write a profile, whole or not at all.

    Parameters
    ----------
    profile : Profile
    path : str or Path
    """
    write_text(path, to_json(profile))


def to_json(profile: Profile) -> str:
    """Return the text of a profile file: each signature once, operations by its number."""
    numbers = {signature: number for number, signature in enumerate(profile.measurements)}
    data = {"schema": SCHEMA, "kind": KIND, **to_data(profile)}
    data["measurements"] = [{"signature": signature, **row} for signature, row in data["measurements"].items()]
    for row in data["operations"]:
        row["measurement"] = numbers.get(row.pop("signature"))
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
    return json_reader.load(path, "profile", from_json, ProfileFileError)


def from_json(text: str) -> Profile:
    """Read the text of a profile file."""
    root = parse(text, "profile")
    if not root.has("kind") or root["kind"].read(str) != KIND:
        raise PlanFileError(f"this is no profile; '{program()} profile MODEL --output FILE' writes one")
    if (schema := root["schema"].read(int)) != SCHEMA:
        raise PlanFileError(f"the profile is of schema {schema}, and only schema {SCHEMA} can be read here")
    measurements = root["measurements"].read(tuple[_Measurement, ...])
    signatures = [row.signature for row in measurements]
    operations = []
    for row in root["operations"].read(tuple[_Operation, ...]):
        data = to_data(row)
        number = data.pop("measurement")
        if number is not None and number >= len(signatures):
            raise PlanFileError(f"an operation names measurement {number} of {len(signatures)}")
        operations.append(ProfiledOperation(signature="" if number is None else signatures[number], **data))
    return Profile(
        **{key: root[key].read(str) for key in ("model", "device", "torch", "date")},
        inputs=root["inputs"].read(tuple[tuple[int, ...], ...]),
        measurements={
            row.signature: Measurement(**{key: value for key, value in to_data(row).items() if key != "signature"})
            for row in measurements
        },
        operations=tuple(operations),
    )
