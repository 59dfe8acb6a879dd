"""The next run on a GPU is rehearsed: a case that asks for what is no longer there would waste its minutes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu as benchmark
from tests.cuda import gpu
from tests.tiers import tiered

gpu.required()


CASES = ["peers dit-xl2", "peers", "compiled dit-xl2", "tiny", "largest", "profile"]


@pytest.mark.parametrize("case", tiered(CASES, quick=CASES[:1]))
@gpu.only_fake
def test_a_rehearsal_has_no_errors(case: str, tmp_path: Path) -> None:
    result = tmp_path / "gpu.json"
    benchmark.main(["--rehearsal", "--slower", "4", "--only", case, "--json", str(result)])
    rows = json.loads(result.read_text(encoding="utf-8"))["rows"]
    assert rows and not [row for row in rows if row.get("status") in ("error", "out of memory")]
