"""Runs steps of a model: on a CPU, on a GPU, or as a fake."""
