"""All that a what-if has come to, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, dataclass, fields
from typing import Any

from planner.analysis.trade_off.accelerators import DeviceRow
from planner.analysis.trade_off.methods import Method
from planner.analysis.trade_off.types import TradeOffCurve, TradeOffPoint
from planner.plans.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The curve and the other axes that were asked about."""

    curve: TradeOffCurve
    devices: tuple[DeviceRow, ...] = ()
    methods: tuple[Method, ...] = ()
    interrupted: bool = False
    """Whether something is missing because the search was interrupted."""
    plans: tuple[Plan, ...] = ()
    """The plan of each point, for who wants to look into it; no part of the report."""

    def report(self) -> dict[str, Any]:
        """Return everything as plain data for JSON."""
        return {
            **self.curve.report(),
            "interrupted": self.interrupted,
            "batch_sizes": self.curve.batch_sizes.report() if self.curve.batch_sizes else None,
            "seq_lens": self.curve.seq_lens.report() if self.curve.seq_lens else None,
            "devices": [row.report() for row in self.devices],
            "solvers": [method.report() for method in self.methods],
        }


def csv_text(curve: TradeOffCurve) -> str:
    """Return the points of a curve as CSV, one a line; what is unknown is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(TradeOffPoint)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(point) for point in curve.points)
    return text.getvalue()
