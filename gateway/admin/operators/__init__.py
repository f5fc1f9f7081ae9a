"""Operators of this deployment."""
