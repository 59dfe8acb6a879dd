"""Exporters to frameworks that are asked for less often; found by :mod:`planner.exporters` by their files."""
