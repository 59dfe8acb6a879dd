"""Sizes and durations: what can be read, what is refused, what is written."""

from __future__ import annotations

import contextlib
import math

import numpy
import pytest

from planner.common.units import format_bytes, format_percent, format_seconds, parse_size
from planner.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("8 gib", 8 * 2**30),
        ("8G", 8 * 2**30),
        (" 1.5MiB ", 3 * 2**19),
        (".5KiB", 512),
        ("4096", 4096),
        ("4096B", 4096),
        ("2TB", 2 * 10**12),
        (4096, 4096),
        (4096.9, 4096),
        (2**70, 2**70),
        (numpy.int64(4096), 4096),
        (numpy.float32(4096.5), 4096),
        ("9007199254740993", 9007199254740993),  # no float in between
    ],
)
def test_reads_sizes(text: str | int | float, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(("text", "size_bytes"), [("60%", 600), ("0.1 %", 1), ("150%", 1500), ("100%", 1000)])
def test_reads_percentages_of_a_whole(text: str, size_bytes: int) -> None:
    assert parse_size(text, whole_bytes=1000) == size_bytes


@pytest.mark.parametrize(
    "size",
    ["", " ", "eight", "8XB", "-8GiB", "8,5GiB", "1e9", "GiB", "%", "-60%", "nan", "inf", "0", "0%", "0.0GiB", 0, -1,
     math.nan, math.inf, -math.inf, True, None, [8], b"8GiB", "8GiB8", "٣GiB"],
)  # fmt: skip
def test_refuses_what_is_no_size_in_one_line(size: object) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(size, whole_bytes=1000)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0.6, "0.6"])
def test_a_share_is_to_be_written_as_a_percentage(size: float | str) -> None:
    with pytest.raises(UsageError, match="less than a byte: did you mean '60%'"):
        parse_size(size, whole_bytes=1000)


def test_a_percentage_needs_a_whole() -> None:
    with pytest.raises(UsageError, match="percentage"):
        parse_size("60%")


def test_overlong_numbers_are_refused_or_read_but_never_crash() -> None:
    for text in ("9" * 400 + "GiB", "9" * 5000, "9" * 400 + ".0GiB", "9" * 400 + "%"):
        with contextlib.suppress(UsageError):
            assert parse_size(text, whole_bytes=1000) > 0


def test_writes_sizes_durations_and_ratios() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 2**20, -(2**30), 2**40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.0 MiB", "-1.00 GiB", "1,024.00 GiB",
    ]  # fmt: skip
    assert [format_seconds(s) for s in (0.0, 5e-4, 0.5, 90.0)] == ["0 us", "500 us", "500.0 ms", "90.00 s"]
    assert format_percent(0.0844) == "8.4%"
