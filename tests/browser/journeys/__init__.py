"""Stories that are played on pages alone, and kept as film strips in docs/journeys.md."""
