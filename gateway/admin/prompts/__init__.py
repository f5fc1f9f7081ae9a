"""Stored prompt templates."""
