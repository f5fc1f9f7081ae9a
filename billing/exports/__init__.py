"""Exports: subjects, formats, FOCUS, and where they are sent."""
