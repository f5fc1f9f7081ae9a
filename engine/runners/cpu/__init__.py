"""Runs steps on a CPU."""
