"""Exports of figures, and their schedules."""
