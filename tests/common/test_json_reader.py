"""Dataclasses out of JSON: every field is held to its type, and what is wrong is named by its path."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest

from planner.common.json_reader import load, parse, to_data
from planner.errors import PlanFileError, UsageError


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    size: int
    late: bool = field(default=False, metadata={"older": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    name: str
    colour: Colour
    kind: Literal["a", "b"]
    share: float
    moved: int = field(metadata={"signed": True})
    inner: int = field(metadata={"at": "outer.inner"})
    limit: float | None
    hashes: dict[str, str | int]
    sizes: tuple[tuple[int, ...], ...]
    part: Row | None = field(default=None, metadata={"left_out": True})
    table: tuple[Row, ...] = field(default=(), metadata={"columns": True})
    secret: int = field(default=0, compare=False)


THING = Thing(
    name="now", colour=Colour.BLUE, kind="b", share=0.5, moved=-3, inner=4, limit=None, hashes={"a": -1, "b": "x"},
    sizes=((1, 2), ()), part=Row(name="p", size=1), table=(Row(name="r", size=2), Row(name="s", size=3, late=True)),
)  # fmt: skip


def read(data: Any) -> Thing:
    return parse(json.dumps(data), "thing").read(Thing)


def test_what_is_written_is_read_again() -> None:
    data = to_data(replace(THING, secret=7))
    assert data["outer"] == {"inner": 4} and "secret" not in data
    assert data["table"] == {"name": ["r", "s"], "size": [2, 3], "late": [False, True]}
    assert read(data) == THING and read(data).secret == 0
    bare = replace(THING, part=None, table=())
    assert "part" not in to_data(bare) and read(to_data(bare)) == bare


def test_older_files_are_read() -> None:
    data = to_data(THING)
    del data["part"]["late"], data["table"]["late"]
    found = read({**data, "a key of tomorrow": 1})
    assert found == replace(THING, table=(Row(name="r", size=2), Row(name="s", size=3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *json.loads((Path(__file__).parent / "wrong_fields.json").read_text()),
        ({"name": "x" * 20_000}, "name is longer than 10000 characters"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        read({**to_data(THING), **change})
    assert str(caught.value) == message


def test_what_is_no_object_is_named() -> None:
    with pytest.raises(PlanFileError, match="the thing must be an object, not a list"):
        read([])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "thing.json"
    for content, message in (
        (None, "cannot read thing"),
        (b"\xff\xfe\x00", "is not a thing: it is not UTF-8"),
        (b" " * 101, "is over 100 bytes"),
        (b"{", "thing.json: not a whole"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UsageError, match=message):
            load(path, "thing", lambda text: parse(text, "thing").read(Thing), UsageError, 100)
