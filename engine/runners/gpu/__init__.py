"""Runs steps on a GPU, in graphs."""
