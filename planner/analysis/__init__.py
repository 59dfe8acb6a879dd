"""Questions asked of a captured step: studies, curves, audits, comparisons, explanations. Without torch."""
