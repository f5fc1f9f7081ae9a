"""Exports: subjects, file formats, the FOCUS export, schedules and destinations."""
