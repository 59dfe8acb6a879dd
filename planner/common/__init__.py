"""What every room may use: units, atomic files, strict JSON, search limits. Without torch."""
