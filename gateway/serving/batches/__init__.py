"""Runs the lines of a batch through the pipeline at the lowest priority."""
